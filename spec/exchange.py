"""The cross-rank step: every rank's report is lifted to a tally, tallies merge, all decide alike.

`merge` is associative, commutative and idempotent, so the tally of a round does not depend on how
many ranks there are or in which order they are combined. On the wire a tally is a vector of
integers and merging is an element-wise maximum: one `all_reduce(MAX)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from spec.config import Config, Idle, Mode, Terms

Target = int
"""T, the number of steps of a round."""


class Report(NamedTuple):
    """What one rank says about its round.

    terms: where it is and how it is configured.
    want: the number of groups that it formed; 0 if it is drained.
    limit: the most steps that it can take part in: the number of samples that it holds, as every
        step needs one. A drained rank, which can idle for ever, gives the window: no other rank
        can hold more, so that it limits nobody.
    has_spare: whether it keeps a sample to idle with.
    waiting: it holds back steps whose block is not complete.
    failed, closed: its pipeline broke; its trainer stopped early.
    """

    terms: Terms
    want: int
    limit: int
    has_spare: bool
    waiting: bool
    failed: bool
    closed: bool


class Tally(NamedTuple):
    """What any number of reports say together.

    A rank number in `spare_from`, `failed_rank` or `closed_rank` is the lowest rank for which this
    holds. The world size there says that there is none: it is the neutral element of the minimum.
    """

    low: Terms
    high: Terms
    want: int
    limit: int
    any_drained: int
    spare_missing: int
    spare_from: int
    any_waiting: int
    failed_rank: int
    closed_rank: int


@dataclass(frozen=True)
class Steps:
    """All ranks take `target` steps. Before that, `donor` (if any) sends its spare to the ranks
    that have none."""

    target: Target
    donor: int | None


@dataclass(frozen=True)
class Flush:
    """No more steps will be decided on: those that wait for their block are emitted, as a block of
    fewer steps. The next round ends the epoch."""


@dataclass(frozen=True)
class Finish:
    """The epoch is complete."""


@dataclass(frozen=True)
class Close:
    """The trainer of `rank` stopped early: the epoch ends here for all."""

    rank: int


@dataclass(frozen=True)
class Abort:
    """The pipeline of `rank` failed: every rank raises an error that names it."""

    rank: int


@dataclass(frozen=True)
class Mismatch:
    """Ranks differ in a term: nothing that they decide would be the same."""

    term: str
    low: int
    high: int


Decision = Steps | Flush | Finish | Close | Abort | Mismatch


def tally_of(report: Report, rank: int, world_size: int) -> Tally:
    """The tally of a single report."""
    return Tally(
        low=report.terms,
        high=report.terms,
        want=report.want,
        limit=report.limit,
        any_drained=int(report.want == 0),
        spare_missing=int(report.want == 0 and not report.has_spare),
        spare_from=rank if report.has_spare else world_size,
        any_waiting=int(report.waiting),
        failed_rank=rank if report.failed else world_size,
        closed_rank=rank if report.closed else world_size,
    )


def merge(a: Tally, b: Tally) -> Tally:
    """The tally of all the reports behind `a` and `b`."""
    return Tally(
        low=Terms(*map(min, a.low, b.low)),
        high=Terms(*map(max, a.high, b.high)),
        want=max(a.want, b.want),
        limit=min(a.limit, b.limit),
        any_drained=max(a.any_drained, b.any_drained),
        spare_missing=max(a.spare_missing, b.spare_missing),
        spare_from=min(a.spare_from, b.spare_from),
        any_waiting=max(a.any_waiting, b.any_waiting),
        failed_rank=min(a.failed_rank, b.failed_rank),
        closed_rank=min(a.closed_rank, b.closed_rank),
    )


def paper_target(tally: Tally) -> Target:
    """The paper's rule: as many steps as the rank with the most groups wants, but no more than the
    rank with the fewest samples can take part in."""
    return min(tally.want, tally.limit)


def decide(config: Config, world_size: int, tally: Tally, target: Target) -> Decision:
    """What all ranks do next: a function of what all ranks have in common, so all do the same.

    `target` is the policy's proposal for T. Only a round in which every rank is sound and some
    rank holds samples uses it.
    """
    for term, low, high in zip(Terms._fields, tally.low, tally.high, strict=True):
        if low != high:
            return Mismatch(term, low, high)
    if tally.failed_rank < world_size:
        return Abort(tally.failed_rank)
    if tally.closed_rank < world_size:
        return Close(tally.closed_rank)
    ends_early = config.mode is Mode.QUOTA and config.quota is None and tally.any_drained
    if tally.want == 0 or ends_early:
        return Flush() if tally.any_waiting else Finish()
    lend = config.idle is Idle.PAD and tally.spare_missing
    return Steps(target, tally.spare_from if lend else None)


def encode(tally: Tally) -> tuple[int, ...]:
    """The vector whose element-wise maximum over ranks is the encoded merge: minima are negated."""
    return (
        *tally.high,
        *(-value for value in tally.low),
        tally.want,
        -tally.limit,
        tally.any_drained,
        tally.spare_missing,
        -tally.spare_from,
        tally.any_waiting,
        -tally.failed_rank,
        -tally.closed_rank,
    )


def decode(vector: tuple[int, ...]) -> Tally:
    """Inverse of `encode`."""
    width = len(Terms._fields)
    high, low, rest = vector[:width], vector[width : 2 * width], vector[2 * width :]
    want, limit, any_drained, spare_missing, spare_from, any_waiting, *faults = rest
    failed_rank, closed_rank = faults
    return Tally(
        low=Terms(*(-value for value in low)),
        high=Terms(*high),
        want=want,
        limit=-limit,
        any_drained=any_drained,
        spare_missing=spare_missing,
        spare_from=-spare_from,
        any_waiting=any_waiting,
        failed_rank=-failed_rank,
        closed_rank=-closed_rank,
    )
