"""Makes the batch of a step: collate, pin, and the info that goes with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from odb.chunks import PackedSamples, pack
from odb.hooks import NO_HOOKS, Hooks
from odb.info import ODBStepInfo, SampleId
from odb.pinning import Pinner
from spec.messages import Step
from spec.scaling import loss_scale

CollateFn = Callable[[list[Any]], Any]


class LossScaling(Enum):
    """What `info.loss_scale` is in a step that is not idle."""

    EXACT = "exact"
    """W * local weight / weight of the block: gradients, averaged over ranks and added up over the
    block, are those of the weighted mean of all that is in it."""
    NONE = "none"
    """1: for evaluation, or for a trainer that normalizes by itself."""


class Delivery(NamedTuple):
    """What the trainer takes: a batch and its info."""

    batch: Any
    info: ODBStepInfo


@dataclass(frozen=True)
class BatchMaker:
    """Turns steps into deliveries."""

    collate: CollateFn
    pinner: Pinner | None
    scaling: LossScaling
    world_size: int
    accumulation_steps: int
    epoch: int
    hooks: Hooks = NO_HOOKS

    def make(self, step: Step, ids: Sequence[SampleId], samples: list[Any]) -> Delivery:
        """The delivery of a step. `samples`: those of its group, or for an idle step the spare."""
        self.hooks.on_batch(self.epoch, step.number)
        batch = self.collate(samples)
        if self.pinner is not None:
            batch = self.pinner.pin(batch)
        block = step.block
        assert block is not None  # only steps of complete blocks are emitted
        info = ODBStepInfo(
            loss_scale=self._scale(step, block.total.weight),
            idle=step.idle,
            step=step.number,
            round=step.round,
            epoch=self.epoch,
            local_samples=step.local.samples,
            global_samples=step.total.samples,
            local_tokens=step.local.tokens,
            global_tokens=step.total.tokens,
            local_weight=step.local.weight,
            global_weight=step.total.weight,
            sample_ids=tuple(ids),
            block=step.number // self.accumulation_steps,
            block_step=block.place,
            block_steps=block.steps,
            block_samples=block.total.samples,
            block_tokens=block.total.tokens,
            block_weight=block.total.weight,
        )
        return Delivery(batch, info)

    def _scale(self, step: Step, block_weight: int) -> float:
        if self.scaling is LossScaling.NONE:
            return 0.0 if step.idle else 1.0
        return loss_scale(self.world_size, step.local.weight, block_weight)


class Spare:
    """The content of the sample that idle steps are made of, safe from what collate does to it."""

    def __init__(self, packed: PackedSamples) -> None:
        self.packed = packed

    @classmethod
    def of(cls, sample: Any) -> Spare:
        """A copy: a sample is a view into its chunk, and its batch may be changed in place."""
        return cls(copy.deepcopy(pack([sample])))

    def sample(self) -> Any:
        """A fresh copy of the sample."""
        return copy.deepcopy(self.packed).unpack()[0]
