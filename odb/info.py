"""What the trainer is told about each step, and how it travels with the batch."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass
from typing import Any

from odb.errors import BatchTypeError

STEP_INFO_KEY = "odb_step_info"
"""Where `for batch in loader` puts the info; `pop_step_info` takes it off again."""

SampleId = Hashable
"""A sample's identity: its index in a map-style dataset, its position in a stream."""


@dataclass(frozen=True)
class ODBStepInfo:
    """One step of one rank.

    loss_scale: multiply the mean loss of this batch by this before `backward`; the average over
        ranks, added up over the steps of a block, then is the global token mean of the block
        (promise: exact-gradient). 0.0 in an idle step.
    all_samples_this_step: samples of this step on all ranks together (also `global_samples`).
    idle: this rank has no sample left and the batch is a dummy; run forward and backward with it
        all the same, as the other ranks wait in their collectives.
    step, round, epoch: numbered from 0; `step` and `round` within the epoch.
    tokens are costs as `cost_fn` gives them, weight is what `loss_weight_fn` gives.
    sample_ids: the samples of this batch, row by row; empty in an idle step.

    With `accumulation_steps=A`, A steps in a row are a block, for one step of the optimizer; the
    last block of an epoch may be shorter. Without it every step is a block.

    block: number of the block in the epoch. block_step: place of this step in its block, from 0.
    block_steps: how many steps this block has.
    block_samples, block_tokens, block_weight: of all its steps on all ranks together.
    """

    loss_scale: float
    idle: bool
    step: int
    round: int
    epoch: int
    local_samples: int
    global_samples: int
    local_tokens: int
    global_tokens: int
    local_weight: int
    global_weight: int
    sample_ids: tuple[SampleId, ...]
    block: int
    block_step: int
    block_steps: int
    block_samples: int
    block_tokens: int
    block_weight: int

    @property
    def all_samples_this_step(self) -> int:
        """Samples of this step on all ranks together."""
        return self.global_samples

    @property
    def last_in_block(self) -> bool:
        """Whether the optimizer takes its step after this one."""
        return self.block_step == self.block_steps - 1


def attach_step_info(batch: Any, info: ODBStepInfo) -> Any:
    """Put the info into a batch that is a mutable mapping; raise BatchTypeError otherwise."""
    if not isinstance(batch, MutableMapping):
        raise BatchTypeError(
            f"the collate function made a {type(batch).__name__}, which cannot carry the step's "
            "loss scale: iterate `for batch, info in loader.steps()` instead"
        )
    batch[STEP_INFO_KEY] = info
    return batch


def pop_step_info(batch: MutableMapping[str, Any]) -> ODBStepInfo:
    """Take the step's info off a batch, so that `model(**batch)` sees only its own inputs.

    Raises BatchTypeError if the batch does not carry one (any more).
    """
    if not isinstance(batch, MutableMapping) or STEP_INFO_KEY not in batch:
        raise BatchTypeError(
            f"this {type(batch).__name__} carries no step info: was it popped before, or did "
            "something between the loader and here rebuild the batch?"
        )
    info = batch.pop(STEP_INFO_KEY)
    assert isinstance(info, ODBStepInfo)
    return info
