"""Tools for testing distributed training loops: real ranks on this machine, with a time limit, and
faults that happen to them."""

from odb.testing.faults import (
    BlockInSample,
    DelayExchange,
    DropConnection,
    Fault,
    FaultPlan,
    InjectedError,
    KillRank,
    KillWorker,
    RaiseInBatch,
    RaiseInSample,
    SlowRank,
    StopRank,
    UnfiredFaultsError,
)
from odb.testing.injection import ActiveFaults
from odb.testing.ranks import RankError, RankFailure, RankResults, run_ranks

__all__ = [
    "ActiveFaults",
    "BlockInSample",
    "DelayExchange",
    "DropConnection",
    "Fault",
    "FaultPlan",
    "InjectedError",
    "KillRank",
    "KillWorker",
    "RaiseInBatch",
    "RaiseInSample",
    "RankError",
    "RankFailure",
    "RankResults",
    "SlowRank",
    "StopRank",
    "UnfiredFaultsError",
    "run_ranks",
]
