"""DeepSpeed, ZeRO 0 to 3: gradients of blocks of steps through `deepspeed.initialize`'s engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from odb.errors import IntegrationError
from odb.info import ODBStepInfo
from odb.integrations.base import check_exact, check_idles, require
from odb.integrations.progress import Progress
from odb.integrations.steps import StepLoop

WHO = "DeepSpeed"


class DeepSpeedLoop(StepLoop):
    """The steps of a loader, through a DeepSpeed engine.

        engine, *_ = deepspeed.initialize(model=model, config=config)
        loop = DeepSpeedLoop(engine, loader)
        for epoch in range(epochs):
            for batch, info in loop:
                loop.backward(engine(**batch).loss)
                loop.step()

    Before each step it tells the engine whether a block ends with it, so that the engine takes the
    optimizer's and the schedule's step there, also after a shorter last block. The loss is not
    divided by `gradient_accumulation_steps`: its scale is for the whole block.

    `engine.global_samples`, which DeepSpeed takes from the configured batch size, is corrected to
    the samples that were in the steps; it goes into DeepSpeed's monitors and checkpoints.

    engine: what `deepspeed.initialize` returned first. loader: an `ODBDataLoader` of the engine's
    data-parallel ranks, with `accumulation_steps` equal to `gradient_accumulation_steps`. progress:
    counts, and may limit, what is trained on.

    Raises IntegrationError for settings that would make training wrong, see `check_engine`, and
    MissingDependencyError without deepspeed.
    """

    def __init__(self, engine: Any, loader: object, *, progress: Progress | None = None) -> None:
        check_engine(engine)
        super().__init__(
            loader,
            dist.get_process_group_ranks(engine.data_parallel_group),
            WHO,
            progress,
        )
        _check_accumulation(engine, self.accumulation_steps)
        self.engine = engine

    def _around(self, info: ODBStepInfo) -> AbstractContextManager[Any]:
        self.engine.set_gradient_accumulation_boundary(info.last_in_block)
        return nullcontext()

    def _backward(self, scaled: Any) -> None:
        self.engine.backward(scaled, scale_wrt_gas=False)

    def _step(self, info: ODBStepInfo) -> bool:
        count_samples(self.engine, info)
        self.engine.step()
        return bool(info.last_in_block and self.engine.was_step_applied())


def count_samples(engine: Any, info: ODBStepInfo) -> None:
    """Correct `engine.global_samples` for a block, before the engine's step that ends it.

    The engine adds its configured batch size within that step, where it also writes to its
    monitors: with the difference added before, they see the true number.
    """
    if info.last_in_block:
        engine.global_samples += info.block_samples - engine.train_batch_size()


def check_driven(engine: Any, loader: object) -> None:
    """Raise IntegrationError if a trainer that drives this engine by itself cannot train exactly on
    this loader: as `check_engine`, and for a loader of other ranks, without loss scales or idle
    steps, or with other blocks than the engine's configuration says."""
    check_engine(engine)
    facts = check_exact(loader, dist.get_process_group_ranks(engine.data_parallel_group), WHO)
    check_idles(facts, WHO)
    _check_accumulation(engine, facts.accumulation_steps)


def _check_accumulation(engine: Any, steps: int) -> None:
    accumulation = engine.gradient_accumulation_steps()
    if accumulation != steps:
        raise IntegrationError(
            f"the loader makes blocks of {steps} steps, but the engine's configuration says "
            f'"gradient_accumulation_steps": {accumulation}: set both to the same number, as '
            "offloaded optimizers allot memory by it"
        )


def check_engine(engine: Any) -> None:
    """Raise IntegrationError, naming the switch, if this engine cannot train with odb exactly.

    Refused are: what is no DeepSpeedEngine; pipeline modules, which pull batches themselves; an
    engine with `training_data=`, which DeepSpeed cuts into batches of one size; its own curriculum
    or dynamic batching, which do the same; sums of gradients instead of means
    (`gradient_allreduce_op`); `managed_gradient_accumulation: false` and ZenFlow, which take the
    end of a block out of the loop's hands.
    """
    deepspeed = require("deepspeed", "deepspeed")
    if not isinstance(engine, deepspeed.DeepSpeedEngine):
        raise IntegrationError(
            f"a {type(engine).__name__} is no DeepSpeedEngine: pass the first thing that "
            "deepspeed.initialize returns"
        )
    for wrong, advice in (
        (
            engine.pipeline_parallelism,
            "a PipelineModule pulls its micro-batches by itself, and odb cannot scale their "
            "losses: pass deepspeed.initialize a plain module",
        ),
        (
            engine.training_dataloader is not None,
            "training_data= makes DeepSpeed cut batches of one size: leave it out, and iterate "
            "this loop over an ODBDataLoader",
        ),
        (
            _own_sampling(engine),
            'data_efficiency.data_sampling forms batches of its own: set its "enabled" to false',
        ),
        (
            not engine.gradient_average,
            'gradients are added up over ranks: set "gradient_allreduce_op" to "mean", which the '
            "loss scale is made for",
        ),
        (
            not engine.managed_gradient_accumulation(),
            'with "managed_gradient_accumulation": false every step() ends a block: leave it out',
        ),
        (
            engine.zenflow,
            "ZenFlow takes optimizer steps at times of its own: leave zenflow out of "
            "zero_optimization",
        ),
    ):
        if wrong:
            raise IntegrationError(advice)


def _own_sampling(engine: Any) -> bool:
    config = engine.data_efficiency_config()
    return bool(
        engine.data_efficiency_enabled() and config.get("data_sampling", {}).get("enabled", False)
    )
