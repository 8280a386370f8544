"""Exhaustive breadth-first search over the states of a model.

Every reachable state is visited once, states are compared whole, and the order is fixed, so that
the violation found has the shortest trace there is, and is the same in every run.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Generic, NamedTuple, Protocol, TypeVar

import networkx as nx

S = TypeVar("S", bound=Hashable)
A = TypeVar("A")


class Verdict(Enum):
    """What a check found. Only exhaustion proves; unexplored means unknown."""

    HOLDS = "holds"
    REFUTED = "refuted"
    UNKNOWN = "unknown"


class Model(Protocol[S, A]):
    """What can be explored."""

    def initial(self) -> Iterable[S]:
        """The states in which a run may begin."""

    def actions(self, state: S) -> Iterable[A]:
        """What can happen in a state, in a fixed order."""

    def perform(self, state: S, action: A) -> S:
        """The state after an action. An exception it raises is a violation."""


class Broken(NamedTuple):
    """A promise that a state breaks, and how."""

    promise: str
    text: str


@dataclass(frozen=True)
class Property(Generic[S]):
    """A condition on states: `check` returns what a state breaks, or None. `at_end`: it is about
    states in which nothing more can happen, and no others."""

    check: Callable[[S], Broken | None]
    at_end: bool = False


@dataclass(frozen=True)
class Goal(Generic[S]):
    """Something that must happen in some run: a guard against properties that hold of nothing."""

    name: str
    reached: Callable[[S], bool]


@dataclass(frozen=True)
class Limits:
    """Where to give up: most states, most seconds (None: never). What is given up is unknown."""

    states: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Question(Generic[S]):
    """What to ask of a model. `raises`: the promise that falls if an action raises. `terminates`:
    the promise that falls if the system can go round in a circle, where it is asked for."""

    properties: Sequence[Property[S]] = ()
    goals: Sequence[Goal[S]] = ()
    raises: str = "no-error"
    terminates: str | None = None


@dataclass(frozen=True)
class Violation(Generic[S, A]):
    """A broken promise, with a shortest run that breaks it: `states[0]` is an initial state and
    `actions[i]` leads from `states[i]` to `states[i + 1]` (the last action may have raised).

    repeats: where the run can go round for ever, the number of the state to which its last action
    leads back, so that `states[repeats] == states[-1]`.
    """

    promise: str
    text: str
    states: tuple[S, ...]
    actions: tuple[A, ...]
    repeats: int | None = None


@dataclass
class Exploration(Generic[S, A]):
    """What a search covered and found. `depth`: actions on the longest shortest path. `ends`: how
    many states had no action. `unmet`: the goals that no state reached."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    ends: int = 0
    seconds: float = 0.0
    complete: bool = False
    violation: Violation[S, A] | None = None
    unmet: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """HOLDS only if everything was visited, nothing was broken, and every goal was reached."""
        if self.violation is not None:
            return Verdict.REFUTED
        if not self.complete:
            return Verdict.UNKNOWN
        return Verdict.REFUTED if self.unmet else Verdict.HOLDS


class _Search(Generic[S, A]):
    def __init__(self, model: Model[S, A], question: Question[S], limits: Limits) -> None:
        self.model = model
        self.question = question
        self.limits = limits
        self.order: list[S] = []
        self.number: dict[S, int] = {}
        self.parents = array("q")
        self.sources = array("q")
        self.targets = array("q")
        self.result: Exploration[S, A] = Exploration()
        self.open_goals = list(question.goals)

    def visit(self, state: S, parent: int) -> bool:
        """Number a new state and judge it; whether it breaks something."""
        self.number[state] = len(self.order)
        self.order.append(state)
        self.parents.append(parent)
        self.open_goals = [goal for goal in self.open_goals if not goal.reached(state)]
        for property_ in self.question.properties:
            if not property_.at_end:
                broken = property_.check(state)
                if broken is not None:
                    return self.refute(broken, len(self.order) - 1)
        return False

    def refute(self, broken: Broken, number: int, last: A | None = None) -> bool:
        path = []
        at = number
        while at >= 0:
            path.append(self.order[at])
            at = self.parents[at]
        path.reverse()
        actions: list[A] = []
        for before, after in pairwise(path):
            actions.append(self.action_between(before, after))
        if last is not None:
            actions.append(last)
        self.result.violation = Violation(*broken, tuple(path), tuple(actions))
        return True

    def judge_end(self, number: int) -> bool:
        """Judge a state in which nothing can happen; whether it breaks something."""
        for property_ in self.question.properties:
            if property_.at_end:
                broken = property_.check(self.order[number])
                if broken is not None:
                    return self.refute(broken, number)
        return False

    def action_between(self, before: S, after: S) -> A:
        for action in self.model.actions(before):
            if self.model.perform(before, action) == after:
                return action
        raise AssertionError("the model is not deterministic")

    def expand(self, number: int) -> bool:
        """Visit the successors of a state; whether something is broken."""
        state = self.order[number]
        successors = 0
        for action in self.model.actions(state):
            successors += 1
            try:
                after = self.model.perform(state, action)
            except MemoryError:
                raise  # ours, not the model's
            except Exception as error:
                raised = f"{type(error).__name__}: {error}"
                return self.refute(Broken(self.question.raises, raised), number, action)
            self.result.transitions += 1
            target = self.number.get(after)
            if target is None:
                target = len(self.order)
                if self.visit(after, number):
                    return True
            if self.question.terminates is not None:
                self.sources.append(number)
                self.targets.append(target)
        if successors == 0:
            self.result.ends += 1
            return self.judge_end(number)
        return False


def explore(
    model: Model[S, A],
    question: Question[S],
    limits: Limits | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exploration[S, A]:
    """Visit every reachable state of a model, up to the first broken promise.

    `progress(states, depth)` is called now and then.
    """
    search = _Search(model, question, limits or Limits())
    began = time.perf_counter()
    _run(search, began, progress)
    result = search.result
    result.states = len(search.order)
    result.unmet = [goal.name for goal in search.open_goals] if result.complete else []
    if result.complete and question.terminates is not None:
        _look_for_circles(search, question.terminates)
    result.seconds = time.perf_counter() - began
    return result


def _run(search: _Search[S, A], began: float, progress: Callable[[int, int], None] | None) -> None:
    for state in search.model.initial():
        if state not in search.number and search.visit(state, -1):
            return
    limits, level_end, number = search.limits, len(search.order), 0
    while number < len(search.order):
        if number == level_end:
            search.result.depth += 1
            level_end = len(search.order)
        if limits.states is not None and len(search.order) > limits.states:
            return
        if number % 1000 == 0:
            if progress is not None:
                progress(len(search.order), search.result.depth)
            if limits.seconds is not None and time.perf_counter() - began > limits.seconds:
                return
        if search.expand(number):
            _prefer_end(search, number, level_end)
            return
        number += 1
    search.result.complete = True


def _prefer_end(search: _Search[S, A], number: int, level_end: int) -> None:
    """Prefer a violation at an end that is as far away as the state just expanded, and waits for
    its turn, to one that took this state one action more: it is the shorter one."""
    found = search.result.violation
    if found is None or len(found.actions) <= search.result.depth:
        return
    for other in range(number + 1, level_end):
        ended = next(iter(search.model.actions(search.order[other])), None) is None
        if ended and search.judge_end(other):
            return


def _look_for_circles(search: _Search[S, A], promise: str) -> None:
    """Find a cycle that a run can go round for ever: under weak fairness a run that never ends
    stays, from some point on, within a strongly connected part of the states."""
    remaining = _cyclic_part(search)
    if not remaining:
        return
    graph: nx.DiGraph[int] = nx.DiGraph()
    for source, target in zip(search.sources, search.targets, strict=True):
        if source in remaining and target in remaining:
            graph.add_edge(source, target)
    circles = [
        part
        for part in nx.strongly_connected_components(graph)
        if len(part) > 1 or any(graph.has_edge(n, n) for n in part)
    ]
    first = min(min(part) for part in circles)
    size = next(len(part) for part in circles if first in part)
    search.refute(Broken(promise, f"the system can go round {size} states for ever"), first)
    if search.result.violation is not None:
        search.result.violation = _go_round(search, search.result.violation, graph, first)


def _go_round(
    search: _Search[S, A], way: Violation[S, A], graph: nx.DiGraph[int], first: int
) -> Violation[S, A]:
    """Add a shortest way from a state back to itself to a way that leads to it."""
    back: list[int] = min(
        (
            nx.shortest_path(graph, after, first)
            for after in sorted(graph[first])
            if nx.has_path(graph, after, first)
        ),
        key=len,
    )
    states = [search.order[number] for number in (first, *back)]
    actions = [search.action_between(before, after) for before, after in pairwise(states)]
    return replace(
        way,
        states=(*way.states, *states[1:]),
        actions=(*way.actions, *actions),
        repeats=len(way.states) - 1,
    )


def _cyclic_part(search: _Search[S, A]) -> set[int]:
    """What is left when states without successors are taken away, again and again. It is empty
    exactly if there is no cycle, and costs far less than looking for components."""
    count = len(search.order)
    out_degree = array("q", bytes(8 * count))
    incoming: list[array[int]] = [array("q") for _ in range(count)]
    for source, target in zip(search.sources, search.targets, strict=True):
        out_degree[source] += 1
        incoming[target].append(source)
    free = [n for n in range(count) if out_degree[n] == 0]
    left = count
    while free:
        n = free.pop()
        left -= 1
        for source in incoming[n]:
            out_degree[source] -= 1
            if out_degree[source] == 0:
                free.append(source)
    return {n for n in range(count) if out_degree[n] > 0} if left else set()
