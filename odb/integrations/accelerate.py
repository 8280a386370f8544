"""Hugging Face Accelerate: an odb loader whose blocks are the windows of `accumulate()`.

    accelerator = Accelerator(gradient_accumulation_steps=A)
    loader = odb.ODBDataLoader(dataset, token_budget=16384, accumulation_steps=A)
    model, optimizer, scheduler, loader = prepare(accelerator, model, optimizer, scheduler, loader)
    for batch in loader:
        info = odb.pop_step_info(batch)
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss * info.loss_scale)
            optimizer.step(), scheduler.step(), optimizer.zero_grad()

See docs/trainers/accelerate.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from odb.equip import EquippedDataLoader
from odb.errors import IntegrationError
from odb.info import STEP_INFO_KEY, ODBStepInfo, attach_step_info
from odb.integrations.base import (
    AroundLoader,
    check_exact,
    check_idles,
    check_loader,
    check_parallelism,
    require,
)
from odb.integrations.deepspeed import check_driven, count_samples
from odb.integrations.sharing import SharedLoader
from odb.loader import ODBDataLoader

require("accelerate", "accelerate")

from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.data_loader import DataLoaderStateMixin  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.scheduler import AcceleratedScheduler  # noqa: E402
from accelerate.utils import send_to_device  # noqa: E402


class AccelerateLoader(DataLoaderStateMixin, AroundLoader):  # type: ignore[misc]  # accelerate is not typed
    """An odb loader that tells Accelerate where its blocks end; made by `prepare`.

    Accelerate never shards, wraps or cuts it. Batches are on the accelerator's device, and their
    info's `loss_scale` is multiplied by `gradient_accumulation_steps`, as `accelerator.backward`
    divides by that.

    While it is iterated it is the accelerator's active data loader, whose `end_of_dataloader` is
    true at the last step of each block. `accelerator.accumulate` ends its window there, and with
    DeepSpeed `accelerator.backward` takes the optimizer's step.
    """

    def __init__(self, accelerator: Accelerator, loader: ODBDataLoader) -> None:
        self.gradient_state = accelerator.gradient_state
        self.loader = loader
        self._accelerator = accelerator
        self._left_within_block = False

    def __iter__(self) -> Iterator[Any]:
        """An epoch's batches, each with its info inside (see `odb.pop_step_info`).

        Raises IntegrationError if it was left there, and besides as `steps` does.
        """
        for batch, info in self.steps():
            yield attach_step_info(batch, info)
            if STEP_INFO_KEY in batch:
                raise IntegrationError(
                    f"step {info.step} was taken with its info left in the batch, and so without "
                    "its loss scale: call info = odb.pop_step_info(batch), and pass "
                    "loss * info.loss_scale to accelerator.backward. For an evaluation iterate a "
                    "loader that was not prepared"
                )

    def steps(self) -> Iterator[tuple[Any, ODBStepInfo]]:
        """An epoch's (batch, info) pairs, for batches of any type.

        Raises IntegrationError if `gradient_accumulation_steps` is not (any more) the loader's
        `accumulation_steps`, if the last epoch was left within a block, or if a step was taken
        outside of `accelerator.accumulate`; and with DeepSpeed for an engine that would train
        otherwise (see `odb.integrations.deepspeed.check_engine`).
        """
        accelerator = self._accelerator
        accumulation = accelerator.gradient_accumulation_steps
        _check_loader(accelerator, self.loader)
        engine = _engine_of(accelerator)
        if engine is None and accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise IntegrationError(
                "with DeepSpeed prepare the model before the loader is iterated, as its engine "
                "decides when the optimizer steps"
            )
        if self._left_within_block:
            raise IntegrationError(
                "the last epoch was left within a block, whose gradients are in the model: leave "
                "an epoch only after a step with info.last_in_block"
            )
        self.begin()
        try:
            for batch, info in self.loader.steps():
                if accelerator.device_placement:
                    batch = send_to_device(
                        batch, accelerator.device, non_blocking=accelerator.non_blocking
                    )
                self.end_of_dataloader = info.last_in_block
                if engine is not None:
                    count_samples(engine, info)
                yield batch, replace(info, loss_scale=info.loss_scale * accumulation)
                self._check_window(info)
        finally:
            # Not so if that step was not taken: by a `break` in the first line of the loop.
            self._left_within_block = not accelerator.sync_gradients
            self.end()

    def _check_window(self, info: ODBStepInfo) -> None:
        if self._accelerator.sync_gradients != info.last_in_block:
            raise IntegrationError(
                f"step {info.step} is number {info.block_step + 1} of a block of "
                f"{info.block_steps}, but accelerator.sync_gradients was "
                f"{self._accelerator.sync_gradients} in it: take each step inside of exactly one "
                "`with accelerator.accumulate(model):`"
            )


def prepare(accelerator: Accelerator, *objects: Any) -> Any:
    """`accelerator.prepare`, for objects among which there are odb loaders.

    Loaders become AccelerateLoaders. Schedulers step once for each step of the optimizer, where
    Accelerate by itself steps them `num_processes` times; they are registered for
    `accelerator.save_state`. Everything else goes through `accelerator.prepare` as ever. Returns
    the objects in the order given, or the only one.

    Raises IntegrationError for an accelerator whose settings make exact blocks impossible, for a
    loader that aligns other ranks, has `idle="stop"`, no exact loss scales or another number of
    accumulation steps, for a loader of `odb.integrations.mesh`, for a scheduler that Accelerate has
    prepared to step several times, for one whose optimizer is not among the objects, and for one
    beside that of a DeepSpeed configuration.
    """
    _check_accelerator(accelerator)
    _refuse_double_stepping(accelerator, objects)
    _refuse_two_schedules(accelerator, objects)
    if any(isinstance(item, SharedLoader) for item in objects):
        raise IntegrationError(
            "this adapter does not prepare a loader of odb.integrations.mesh: with model "
            "parallelism train without Accelerate"
        )
    rest = [item for item in objects if not _is_ours(item)]
    done = iter(_prepared(accelerator, rest))
    prepared = [item if _is_ours(item) else next(done) for item in objects]
    optimizers = [item for item in prepared if isinstance(item, AcceleratedOptimizer)]
    for place, item in enumerate(prepared):
        if isinstance(item, ODBDataLoader | EquippedDataLoader):
            _check_loader(accelerator, item)
            prepared[place] = AccelerateLoader(accelerator, check_loader(item))
        elif isinstance(item, LRScheduler):
            prepared[place] = _scheduler(accelerator, item, optimizers)
    return prepared[0] if len(prepared) == 1 else tuple(prepared)


def _is_ours(item: Any) -> bool:
    return isinstance(item, ODBDataLoader | EquippedDataLoader | LRScheduler)


def _prepared(accelerator: Accelerator, objects: Sequence[Any]) -> Sequence[Any]:
    if not objects:
        return ()
    prepared: Any = accelerator.prepare(*objects)  # a tuple, or a list, or the only one
    return (prepared,) if len(objects) == 1 else tuple(prepared)


def _scheduler(
    accelerator: Accelerator, scheduler: LRScheduler, optimizers: Sequence[Any]
) -> AcceleratedScheduler:
    own = [item for item in optimizers if _is_optimizer_of(item, scheduler)]
    if not own:
        raise IntegrationError(
            f"the optimizer of the {type(scheduler).__name__} is not among the objects: prepare "
            "both in the same call"
        )
    # `split_batches` is Accelerate's word for "the number of steps does not depend on the number
    # of processes", which is what odb's blocks are like.
    wrapped = AcceleratedScheduler(
        scheduler,
        own,
        step_with_optimizer=accelerator.step_scheduler_with_optimizer,
        split_batches=True,
    )
    accelerator.register_for_checkpointing(wrapped)
    return wrapped


def _is_optimizer_of(prepared: Any, scheduler: LRScheduler) -> bool:
    """Whether they share their groups: DeepSpeed puts optimizers of its own around the one of the
    scheduler, or in its place."""
    own = scheduler.optimizer.param_groups
    return any(group is mine for group in prepared.param_groups for mine in own)


def _engine_of(accelerator: Accelerator) -> Any:
    """DeepSpeed's engine, if the accelerator trains through one and has prepared its model."""
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    return None if wrapped is None else wrapped.engine


def _refuse_double_stepping(accelerator: Accelerator, objects: Sequence[Any]) -> None:
    if accelerator.num_processes == 1:
        return
    for item in objects:
        if _is_divided(accelerator, item):
            raise IntegrationError(
                "DummyScheduler(total_num_steps=...): Accelerate divides that number by the number "
                "of processes, but with odb a schedule takes one step for each step of the "
                'optimizer: leave it out, and set "total_num_steps" in the DeepSpeed configuration'
            )
        if (
            isinstance(item, AcceleratedScheduler)
            and item.step_with_optimizer
            and not item.split_batches
        ):
            raise IntegrationError(
                f"this scheduler was prepared by accelerator.prepare and would take "
                f"{accelerator.num_processes} steps for each step of the optimizer: pass the "
                "scheduler itself to odb.integrations.accelerate.prepare"
            )


def _is_divided(accelerator: Accelerator, item: Any) -> bool:
    """Whether it stands for a scheduler of DeepSpeed whose number of steps Accelerate divides."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED or accelerator.split_batches:
        return False
    from accelerate.utils import DummyScheduler  # not there without DeepSpeed

    return (
        isinstance(item, DummyScheduler)
        and item.lr_scheduler_callable is None
        and item.total_num_steps is not None
    )


def _refuse_two_schedules(accelerator: Accelerator, objects: Sequence[Any]) -> None:
    plugin = accelerator.deepspeed_plugin
    if plugin is None or "scheduler" not in plugin.deepspeed_config:
        return
    if any(isinstance(item, LRScheduler) for item in objects):
        raise IntegrationError(
            'a scheduler is among the objects, and the DeepSpeed configuration has a "scheduler", '
            "too: both would set the learning rate. Leave one of them out"
        )


def _check_accelerator(accelerator: Accelerator) -> None:
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        raise IntegrationError(
            "Accelerate's Megatron-LM engine decides by itself when the optimizer steps: use "
            "odb.integrations.megatron without Accelerate"
        )
    if not accelerator.gradient_state.sync_with_dataloader:
        raise IntegrationError(
            "GradientAccumulationPlugin(sync_with_dataloader=False) does not end a window at the "
            "end of a block: set sync_with_dataloader=True"
        )
    check_parallelism(accelerator)


def _check_loader(accelerator: Accelerator, loader: Any) -> None:
    facts = check_exact(loader, range(accelerator.num_processes), "Accelerate")
    check_idles(facts, "Accelerate")
    if facts.accumulation_steps != accelerator.gradient_accumulation_steps:
        raise IntegrationError(
            f"the loader has accumulation_steps={facts.accumulation_steps}, but the accelerator "
            f"has gradient_accumulation_steps={accelerator.gradient_accumulation_steps} (of its "
            "argument, its plugin or `accelerate config`): pass the same number to both"
        )
    engine = _engine_of(accelerator)
    if engine is not None:
        check_driven(engine, loader)
