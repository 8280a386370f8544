"""Models whose answers are known, because others wrote and counted them, or a pencil suffices."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from model_check.explorer import Broken

N = TypeVar("N", bound=Hashable)

# ---------------------------------------------------------------- two-phase commit

WORKING, PREPARED, COMMITTED, ABORTED = range(4)
"""The states of a resource manager. Of the manager, 0 is "init", and the last two are the same."""

RM_BITS = 4
"""A resource manager takes four bits of a state: its state (2), whether the manager has counted its
"prepared" (1), and whether it has sent one (1)."""


class TwoPhaseCommit:
    """Two-phase commit as Gray and Lamport wrote it in TLA+: messages are never consumed.

    A state is one integer, as there are many of them: four bits for each resource manager (`rms` of
    them), above these the manager's state (2), "commit was sent" (1) and "abort was sent" (1).
    `symmetric` keeps one state of those that differ by the names of resource managers.
    """

    def __init__(self, rms: int, symmetric: bool = False) -> None:
        self.rms = rms
        self.symmetric = symmetric
        self.manager = RM_BITS * rms
        self.commit_sent = 1 << (self.manager + 2)
        self.abort_sent = 1 << (self.manager + 3)
        self.shifts = range(0, self.manager, RM_BITS)
        self.all_counted = sum(4 << shift for shift in self.shifts)

    def initial(self) -> Iterable[int]:
        return (0,)

    def actions(self, state: int) -> list[tuple[int, int]]:
        """Each action as (bits to clear, bits to set)."""
        found = []
        manager_init = not (state >> self.manager) & 3
        if manager_init:
            if state & self.all_counted == self.all_counted:
                found.append((0, COMMITTED << self.manager | self.commit_sent))
            found.append((0, ABORTED << self.manager | self.abort_sent))
        for shift in self.shifts:
            rm = state >> shift
            if manager_init and rm & 8:
                found.append((0, 4 << shift))
            if rm & 3 == WORKING:
                found.append((0, (PREPARED | 8) << shift))
                found.append((0, ABORTED << shift))
            if state & self.commit_sent:
                found.append((3 << shift, COMMITTED << shift))
            if state & self.abort_sent:
                found.append((3 << shift, ABORTED << shift))
        return found

    def perform(self, state: int, action: tuple[int, int]) -> int:
        clear, put = action
        after = state & ~clear | put
        return self.canonical(after) if self.symmetric else after

    def canonical(self, state: int) -> int:
        """The same state with its resource managers in order."""
        ordered = sorted((state >> shift) & 15 for shift in self.shifts)
        head = state >> self.manager << self.manager
        return head | sum(rm << shift for rm, shift in zip(ordered, self.shifts, strict=True))

    def consistent(self, state: int) -> Broken | None:
        """No resource manager commits where another aborts."""
        states = {(state >> shift) & 3 for shift in self.shifts}
        if {COMMITTED, ABORTED} <= states:
            return Broken("consistent", "one has committed, another has aborted")
        return None

    def all_at(self, state: int, where: int) -> bool:
        """Whether every resource manager is in a state."""
        return all((state >> shift) & 3 == where for shift in self.shifts)


# ---------------------------------------------------------------- a linear equation


@dataclass(frozen=True)
class LinearEquation:
    """Looks for bytes x and y with a·x + b·y = c by adding one to either. A solution is an end, so
    that it is noticed when its turn comes, as in the search that the known counts come from."""

    a: int
    b: int
    c: int

    def initial(self) -> Iterable[tuple[int, int]]:
        return ((0, 0),)

    def solved(self, state: tuple[int, int]) -> bool:
        return (self.a * state[0] + self.b * state[1]) % 256 == self.c

    def actions(self, state: tuple[int, int]) -> Sequence[str]:
        return () if self.solved(state) else ("x", "y")

    def perform(self, state: tuple[int, int], action: str) -> tuple[int, int]:
        x, y = state
        return ((x + 1) % 256, y) if action == "x" else (x, (y + 1) % 256)

    def found(self, state: tuple[int, int]) -> Broken | None:
        return Broken("no-solution", f"{state}") if self.solved(state) else None


# ---------------------------------------------------------------- an increment without a lock


class Increment(NamedTuple):
    """A shared counter, and of each thread what it has read and where it is: 1 to read, 2 to write,
    3 done."""

    counter: int
    threads: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Increments:
    """Threads add one to a counter, each by a read and a write, without a lock."""

    threads: int = 2
    symmetric: bool = False

    def initial(self) -> Iterable[Increment]:
        return (Increment(0, ((0, 1),) * self.threads),)

    def actions(self, state: Increment) -> Sequence[int]:
        return [i for i, (_, at) in enumerate(state.threads) if at < 3]

    def perform(self, state: Increment, action: int) -> Increment:
        threads = list(state.threads)
        counter = state.counter
        read, at = threads[action]
        if at == 1:
            threads[action] = (counter, 2)
        else:
            counter = read + 1
            threads[action] = (read, 3)
        return Increment(counter, tuple(sorted(threads) if self.symmetric else threads))

    def nothing_lost(self, state: Increment) -> Broken | None:
        """The counter is the number of threads that are done."""
        done = sum(at == 3 for _, at in state.threads)
        return Broken("nothing-lost", f"{state}") if done != state.counter else None


# ---------------------------------------------------------------- two that SPIN judges as well


@dataclass(frozen=True)
class TwoLocks:
    """Two processes that each take two locks, one after the other, and release both, for ever.
    `ordered`: both take them in the same order; else each takes its own first.

    A state is, for each process, how many locks it holds.
    """

    ordered: bool

    def initial(self) -> Iterable[tuple[int, int]]:
        return ((0, 0),)

    def _wants(self, process: int, held: int) -> int:
        first = 0 if self.ordered else process
        return first if held == 0 else 1 - first

    def actions(self, state: tuple[int, int]) -> Sequence[int]:
        taken = {self._wants(p, n) for p in (0, 1) for n in range(state[p])}
        return [p for p in (0, 1) if state[p] == 2 or self._wants(p, state[p]) not in taken]

    def perform(self, state: tuple[int, int], action: int) -> tuple[int, int]:
        held = list(state)
        held[action] = 0 if held[action] == 2 else held[action] + 1
        return held[0], held[1]

    def never_stuck(self, state: tuple[int, int]) -> Broken | None:
        """For an end: there should be none."""
        return Broken("deadlock-freedom", f"the processes hold {state} locks")


class Flags(NamedTuple):
    """Whether each process wants to enter, where it is, and whose turn it is."""

    want: tuple[bool, bool]
    at: tuple[str, str]
    turn: int


@dataclass(frozen=True)
class AfterYou:
    """Two processes that each raise a flag and enter once if the other's is down. If it is up, they
    lower theirs and try again, which may go on for ever. `turns`: whoever raises its flag gives
    the turn to the other, and waits with its flag up until the other's is down or it has the turn
    (Peterson's way)."""

    turns: bool

    def initial(self) -> Iterable[Flags]:
        return (Flags((False, False), ("raise", "raise"), 0),)

    def _blocked(self, state: Flags, process: int) -> bool:
        theirs = self.turns and state.turn != process
        return state.want[1 - process] and (theirs or not self.turns)

    def actions(self, state: Flags) -> Sequence[int]:
        found = []
        for process in (0, 1):
            waits = self.turns and state.at[process] == "look" and self._blocked(state, process)
            if state.at[process] != "done" and not waits:
                found.append(process)
        return found

    def perform(self, state: Flags, action: int) -> Flags:
        want, at, turn = list(state.want), list(state.at), state.turn
        match at[action]:
            case "raise":
                want[action], at[action] = True, "look"
                turn = 1 - action if self.turns else turn
            case "look":
                at[action] = "lower" if self._blocked(state, action) else "inside"
            case "lower":
                want[action], at[action] = False, "raise"
            case _:
                want[action], at[action] = False, "done"
        return Flags((want[0], want[1]), (at[0], at[1]), turn)

    def one_inside(self, state: Flags) -> Broken | None:
        """At most one process is inside."""
        return Broken("one-inside", "both are") if state.at == ("inside", "inside") else None


# ---------------------------------------------------------------- any graph


@dataclass(frozen=True)
class Graph(Generic[N]):
    """A model written down as a graph: an edge's action is named after where it leads. An edge to
    an exception raises it."""

    edges: Mapping[N, Sequence[N | Exception]]
    start: Sequence[N]

    def initial(self) -> Iterable[N]:
        return self.start

    def actions(self, state: N) -> Sequence[N | Exception]:
        return self.edges.get(state, ())

    def perform(self, state: N, action: N | Exception) -> N:
        if isinstance(action, Exception):
            raise action
        return action
