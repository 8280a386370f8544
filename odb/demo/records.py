"""What the ranks write down while they train: plain values that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Way(Enum):
    """The three ways of batching that the demo compares."""

    FIXED = "fixed"
    SORTED = "sorted"
    ODB = "odb"

    @property
    def title(self) -> str:
        """Its name for people."""
        return {
            Way.FIXED: "fixed size",
            Way.SORTED: "fixed, sorted",
            Way.ODB: "ODB",
        }[self]


class StepRecord(NamedTuple):
    """One step of one rank.

    seconds: on this rank's clock, from the start of the way to the end of the step.
    waited: seconds of these that the rank waited for its batch.
    rows and padded: size of the batch, padded = rows times length. tokens: real ones among them;
    an idle step has none, as its batch is a dummy. update: whether it ended with an update of the
    weights. sample_ids: the samples of the batch, row by row.
    """

    epoch: int
    number: int
    seconds: float
    waited: float
    rows: int
    padded: int
    tokens: int
    update: bool
    loss: float
    sample_ids: tuple[int, ...]


class Checkpoint(NamedTuple):
    """The validation loss at one moment, as this rank's part of a sum over ranks.

    seconds: on the clock. tokens: real ones that this rank had trained on by then.
    """

    seconds: float
    tokens: int
    loss_sum: float
    weight: int


@dataclass
class RankRecord:
    """What one rank did in one way.

    seconds: of the whole way: making the loader, its workers, all steps, waiting for all ranks.
    accumulate: steps whose gradients make one update of the weights.
    measuring: seconds of these in which lengths were taken before training (sorted way only).
    """

    way: Way
    accumulate: int
    seconds: float = 0.0
    measuring: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
