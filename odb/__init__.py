"""odb: a verified online dynamic batcher for distributed training.

loader = odb.ODBDataLoader(dataset, token_budget=16384)
for batch in loader:
    info = odb.pop_step_info(batch)
    loss = model(**batch).loss * info.loss_scale
"""

import spec as _spec

if getattr(_spec, "ODB_PROTOCOL", None) != "odb":
    raise ImportError(
        f"the package `spec` at {getattr(_spec, '__path__', _spec)} is not odb's: another package "
        "or folder of that name stands before it on sys.path. Rename it, or change the order"
    )

from odb.collate import PadCollate
from odb.costs import Resource, default_cost, default_loss_weight
from odb.equip import apply
from odb.errors import (
    BatchError,
    BatchTypeError,
    ConfigError,
    CostError,
    ExchangeTimeoutError,
    IntegrationError,
    MismatchError,
    MissingDependencyError,
    NotDistributedError,
    ODBError,
    PeerFailedError,
    PeerLostError,
    PipelineError,
    SampleError,
    TooManySkippedError,
    WorkerLostError,
)
from odb.info import ODBStepInfo, pop_step_info
from odb.loader import ODBDataLoader
from odb.microbatch import Microbatch, MicrobatchPlan, plan_microbatches
from odb.stats import FilteredSample, LoaderStats

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "BatchTypeError",
    "ConfigError",
    "CostError",
    "ExchangeTimeoutError",
    "FilteredSample",
    "IntegrationError",
    "LoaderStats",
    "Microbatch",
    "MicrobatchPlan",
    "MismatchError",
    "MissingDependencyError",
    "NotDistributedError",
    "ODBDataLoader",
    "ODBError",
    "ODBStepInfo",
    "PadCollate",
    "PeerFailedError",
    "PeerLostError",
    "PipelineError",
    "Resource",
    "SampleError",
    "TooManySkippedError",
    "WorkerLostError",
    "apply",
    "default_cost",
    "default_loss_weight",
    "plan_microbatches",
    "pop_step_info",
]
