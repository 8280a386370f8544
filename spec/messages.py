"""The events that a rank's state machine takes and the commands that it gives.

Whoever drives a machine (the loader, the explorer, the simulator) performs each command and feeds
back the event that the command asks for:

    Pull            Arrived, InputEnded, Failed or Closed
    PostReport      Tallied or PeerLost
    PostCounts      Totalled or PeerLost
    Emit            Emitted, Failed or Closed
    Filter, KeepSpare, ShareSpare, Retire, GiveUp, ShareReason, End     none

and may feed PeerLost at any time before the end.

These are dataclasses, as named tuples of different types are equal when their fields are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from spec.exchange import Tally
from spec.samples import Counts, Group, Sample

# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Arrived:
    """Samples from the input, at most as many as were asked for, numbered on from the last."""

    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class InputEnded:
    """The input has no more samples in this epoch."""


@dataclass(frozen=True)
class Failed:
    """This rank's pipeline broke: reading a sample, or making the batch of the step at hand."""


@dataclass(frozen=True)
class Closed:
    """This rank's trainer stopped early and takes no more steps."""


@dataclass(frozen=True)
class Tallied:
    """The exchange of reports is complete."""

    tally: Tally


@dataclass(frozen=True)
class Totalled:
    """The exchange of counts is complete: for each step of the round, the sums over all ranks."""

    totals: tuple[Counts, ...]


@dataclass(frozen=True)
class Emitted:
    """The step at hand is in the output queue."""


@dataclass(frozen=True)
class PeerLost:
    """Another rank is gone (`rank`, where that is known): an exchange broke, or its connection."""

    rank: int | None


Event = Arrived | InputEnded | Failed | Closed | Tallied | Totalled | Emitted | PeerLost

# ---------------------------------------------------------------- commands


class Block(NamedTuple):
    """What a step knows of its block: its own place in it, from 0, how many steps the block has,
    and what they add up to on all ranks together."""

    place: int
    steps: int
    total: Counts


class Step(NamedTuple):
    """One step of one rank: its number in the epoch, the round that decided on it, its group
    (empty: idle), what the group adds up to here and what all ranks' groups add up to. `block` is
    known once all steps of the block are decided on."""

    number: int
    round: int
    group: Group
    local: Counts
    total: Counts
    block: Block | None = None

    @property
    def idle(self) -> bool:
        """Whether this rank has nothing to contribute to this step."""
        return not self.group


@dataclass(frozen=True)
class Pull:
    """Ask the input for at least one and at most `limit` samples."""

    limit: int


@dataclass(frozen=True)
class Filter:
    """Let go of a sample that cannot be trained on, and list it."""

    sample: Sample


@dataclass(frozen=True)
class KeepSpare:
    """Remember this sample's content: idle steps are made of it."""

    sample: Sample


@dataclass(frozen=True)
class PostReport:
    """Merge this tally with all other ranks' (collective)."""

    tally: Tally


@dataclass(frozen=True)
class ShareSpare:
    """`donor` sends its spare to all; ranks without one keep it (collective)."""

    donor: int


@dataclass(frozen=True)
class PostCounts:
    """Sum these counts, one for each step of the round, over all ranks (collective)."""

    counts: tuple[Counts, ...]


@dataclass(frozen=True)
class Emit:
    """Make the batch of this step and put it into the output queue."""

    step: Step


@dataclass(frozen=True)
class Retire:
    """End the trainer's iteration on this drained rank; the exchange goes on without it."""


@dataclass(frozen=True)
class GiveUp:
    """End the trainer's iteration with this rank's error: it cannot make even an idle step. The
    exchange goes on, to tell the other ranks."""


@dataclass(frozen=True)
class ShareReason:
    """`rank` tells all others why it failed (collective)."""

    rank: int


@dataclass(frozen=True)
class Finished:
    """The epoch ended as its mode says."""


@dataclass(frozen=True)
class ClosedBy:
    """The epoch ended because the trainer of `rank` stopped early."""

    rank: int


@dataclass(frozen=True)
class AbortedBy:
    """The epoch ended because the pipeline of `rank` failed."""

    rank: int


@dataclass(frozen=True)
class Mismatched:
    """The epoch ended because ranks differ in a term."""

    term: str
    low: int
    high: int


@dataclass(frozen=True)
class Lost:
    """The epoch ended because a rank is gone. Steps that are still in the queue are dropped: they
    would lead the trainer into a gradient that cannot complete."""

    rank: int | None


Outcome = Finished | ClosedBy | AbortedBy | Mismatched | Lost


@dataclass(frozen=True)
class End:
    """The epoch is over on this rank, behind all the steps emitted before."""

    outcome: Outcome


Command = (
    Pull
    | Filter
    | KeepSpare
    | PostReport
    | ShareSpare
    | PostCounts
    | Emit
    | Retire
    | GiveUp
    | ShareReason
    | End
)
