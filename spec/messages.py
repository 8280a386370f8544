"""The events that a rank's state machine takes and the commands that it gives.

Whoever drives a machine (the loader, the explorer, the simulator) performs each command and feeds
back the event that the command asks for:

    Pull            Arrived, InputEnded, Failed or Closed
    PostReport      Tallied or PeerLost
    PostCounts      Totalled or PeerLost
    Emit            Emitted, Failed or Closed
    Filter, KeepSpare, ShareSpare, Retire, ShareReason, End     none
"""

from __future__ import annotations

from typing import NamedTuple

from spec.exchange import Tally
from spec.samples import Counts, Group, Sample

# ---------------------------------------------------------------- events


class Arrived(NamedTuple):
    """Samples from the input, at most as many as were asked for, numbered on from the last."""

    samples: tuple[Sample, ...]


class InputEnded(NamedTuple):
    """The input has no more samples in this epoch."""


class Failed(NamedTuple):
    """This rank's pipeline broke: reading a sample, or making the batch of the step at hand."""


class Closed(NamedTuple):
    """This rank's trainer stopped early and takes no more steps."""


class Tallied(NamedTuple):
    """The exchange of reports is complete."""

    tally: Tally


class Totalled(NamedTuple):
    """The exchange of counts is complete: for each step of the round, the sums over all ranks."""

    totals: tuple[Counts, ...]


class Emitted(NamedTuple):
    """The step at hand is in the output queue."""


class PeerLost(NamedTuple):
    """An exchange broke because another rank is gone (`rank`, where that is known)."""

    rank: int | None


Event = Arrived | InputEnded | Failed | Closed | Tallied | Totalled | Emitted | PeerLost

# ---------------------------------------------------------------- commands


class Step(NamedTuple):
    """One step of one rank: its number in the epoch, its group (empty: idle), what the group adds
    up to here and what all ranks' groups add up to."""

    number: int
    round: int
    group: Group
    local: Counts
    total: Counts

    @property
    def idle(self) -> bool:
        """Whether this rank has nothing to contribute to this step."""
        return not self.group


class Pull(NamedTuple):
    """Ask the input for at least one and at most `limit` samples."""

    limit: int


class Filter(NamedTuple):
    """Let go of a sample that cannot be trained on, and list it."""

    sample: Sample


class KeepSpare(NamedTuple):
    """Remember this sample's content: idle steps are made of it."""

    sample: Sample


class PostReport(NamedTuple):
    """Merge this tally with all other ranks' (collective)."""

    tally: Tally


class ShareSpare(NamedTuple):
    """`donor` sends its spare to all; ranks without one keep it (collective)."""

    donor: int


class PostCounts(NamedTuple):
    """Sum these counts, one for each step of the round, over all ranks (collective)."""

    counts: tuple[Counts, ...]


class Emit(NamedTuple):
    """Make the batch of this step and put it into the output queue."""

    step: Step


class Retire(NamedTuple):
    """End the trainer's iteration on this drained rank; the exchange goes on without it."""


class ShareReason(NamedTuple):
    """`rank` tells all others why it failed (collective)."""

    rank: int


class Finished(NamedTuple):
    """The epoch ended as its mode says."""


class ClosedBy(NamedTuple):
    """The epoch ended because the trainer of `rank` stopped early."""

    rank: int


class AbortedBy(NamedTuple):
    """The epoch ended because the pipeline of `rank` failed."""

    rank: int


class Mismatched(NamedTuple):
    """The epoch ended because ranks differ in a term."""

    term: str
    low: int
    high: int


class Lost(NamedTuple):
    """The epoch ended because a rank is gone."""

    rank: int | None


Outcome = Finished | ClosedBy | AbortedBy | Mismatched | Lost


class End(NamedTuple):
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
    | ShareReason
    | End
)
