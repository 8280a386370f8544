"""What a rank is doing, and which ranks the others wait for: plain facts and their sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from odb.watch.tree import ancestors
from spec.messages import Command, Emit, End, PostCounts, PostReport, Pull, ShareReason, ShareSpare
from spec.rank import Phase, RankState

SILENT_S = 3.0
"""A rank that has said nothing for this long is called silent: frozen, swapping, or cut off."""

MOST_NAMED = 8
"""Ranks that a sentence names one by one."""

ALL_EXCHANGES = 2**60
"""More than a run over an epoch has."""


class Doing(Enum):
    """What a rank's driver does."""

    STARTING = "has not begun to iterate its loader"
    BETWEEN = "has ended its epoch and not begun the next"
    PULLING = Phase.FILLING.value
    REPORTING = Phase.REPORTING.value
    TOTALLING = Phase.TOTALLING.value
    MAKING = "making the batch"
    HANDING_OVER = "waiting for its trainer to take a step"
    CLOSED = "has closed its loader"


AT_REST = frozenset({Doing.STARTING, Doing.BETWEEN})
"""What a rank does that is in no epoch."""

WAITING = frozenset({Doing.REPORTING, Doing.TOTALLING})
"""What a rank does that waits for all others."""


class Status(NamedTuple):
    """What a rank is doing. `step`: the one at hand, or the next. `have` of `want` samples are in
    the window while it is being filled. `run`: how many epochs it has begun, which tells two runs
    over the same epoch apart."""

    doing: Doing
    epoch: int = 0
    round: int = 0
    step: int = 0
    have: int = 0
    want: int = 0
    run: int = 0

    def progress(self) -> tuple[int, int]:
        """How many exchanges of which run it has entered; comparable between ranks."""
        match self.doing:
            case Doing.STARTING:
                return self.run, -1
            case Doing.BETWEEN | Doing.CLOSED:
                return self.run, ALL_EXCHANGES
            case Doing.REPORTING:
                return self.run, 2 * self.round + 1
            case Doing.TOTALLING:
                return self.run, 2 * self.round + 2
            case _:
                return self.run, 2 * self.round

    def sentence(self) -> str:
        """What is being done, for people."""
        match self.doing:
            case Doing.PULLING:
                fill = f"({self.have} of {self.want} samples)"
                return f"{self.doing.value} in round {self.round} {fill}"
            case Doing.REPORTING | Doing.TOTALLING:
                return f"{self.doing.value} in round {self.round}"
            case Doing.MAKING:
                return f"making the batch of step {self.step}"
            case Doing.HANDING_OVER:
                return f"{self.doing.value} (the batch of step {self.step} is ready)"
            case _:
                return str(self.doing.value)


def status_of(command: Command, state: RankState) -> Status | None:
    """What a rank does that performs this command; None if it takes no time."""
    epoch, round_, step = state.place
    match command:
        case Pull(limit):
            have = len(state.window)
            return Status(Doing.PULLING, epoch, round_, step, have, have + limit)
        case PostReport():
            return Status(Doing.REPORTING, epoch, round_, step)
        case PostCounts() | ShareSpare():
            return Status(Doing.TOTALLING, epoch, round_, step)
        case ShareReason():
            return Status(Doing.REPORTING, epoch, round_, step)
        case Emit(emitted):
            return Status(Doing.MAKING, epoch, round_, emitted.number)
        case End():
            return Status(Doing.BETWEEN, epoch, round_, step)
        case _:
            return None


class Seen(NamedTuple):
    """A rank's status as another rank knows it. `since`: when it began, by the clock of the rank
    that knows it; `silent_since`: when the rank was last heard, if that is long ago."""

    status: Status
    since: float
    silent_since: float | None = None

    def pack(self, rank: int, now: float) -> list[Any]:
        """As it crosses to another rank, whose clock differs."""
        silent = None if self.silent_since is None else round(now - self.silent_since, 2)
        doing, *numbers = self.status
        return [rank, doing.name, *numbers, round(now - self.since, 2), silent]


def unpack(packed: list[Any], now: float) -> tuple[int, Seen]:
    """What `Seen.pack` made. Raises ValueError, KeyError or TypeError for anything else."""
    rank, doing, *numbers, age, silent = packed
    if len(numbers) != len(Status._fields) - 1:
        raise ValueError(f"no status: {packed!r}")
    status = Status(Doing[doing], *(int(number) for number in numbers))
    return int(rank), Seen(status, now - float(age), None if silent is None else now - silent)


class Late(NamedTuple):
    """A rank that others wait for: what it does and for how many seconds; `silent_s`: for how long
    it has not answered, if it does not."""

    rank: int
    status: Status
    for_s: float
    silent_s: float | None

    def sentence(self) -> str:
        """Such as "rank 2: filling its window in round 5 (12 of 1024 samples) for 61 s"."""
        if self.silent_s is not None:
            seen = self.status.sentence()
            return (
                f"rank {self.rank}: has not answered for {self.silent_s:.0f} s; last seen: {seen}"
            )
        return f"rank {self.rank}: {self.status.sentence()} for {self.for_s:.0f} s"


def late_ranks(seen: Mapping[int, Seen], now: float) -> tuple[Late, ...]:
    """The ranks that the furthest waiting one waits for: those that have not entered its exchange,
    and those that do not answer. Ranks behind a silent one in the tree are left out, as nothing is
    known of them."""
    waiting = [s.status.progress() for s in seen.values() if s.status.doing in WAITING]
    if not waiting:
        return ()
    front = max(waiting)
    silent = {rank for rank, s in seen.items() if s.silent_since is not None}
    late = []
    for rank in sorted(seen):
        status, since, silent_since = seen[rank]
        hidden = any(above in silent for above in ancestors(rank))
        if rank not in silent and (hidden or status.progress() >= front):
            continue
        late.append(
            Late(rank, status, now - since, None if silent_since is None else now - silent_since)
        )
    return tuple(late)


def report(late: Iterable[Late]) -> str:
    """One sentence that names ranks and what they do."""
    late = list(late)
    if not late:
        return "(which ranks are missing is not known)"
    text = "; ".join(entry.sentence() for entry in late[:MOST_NAMED])
    more = len(late) - MOST_NAMED
    return f"{text}; and {more} more ranks" if more > 0 else text
