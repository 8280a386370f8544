"""The closed system of `spec.world` as a model for the explorer, made fast without changing it.

States are written with a number for each distinct rank-with-environment (a `Node`), in the order
of discovery. Numbers stand for whole nodes, one to one, so that comparing states by them
compares them whole; and what a rank does by itself is computed once for each node.

Two reductions, each optional:

- symmetry: ranks are interchangeable up to their names, so states that differ by a permutation of
  ranks are explored once.
- ample sets: if a rank can act, and nothing that others do can reach it before it has, only its own
  actions are explored in that state. The order of independent actions of different ranks does not
  matter to any promise: each is about a single rank, or about the ends. Where the search finds no
  circle, no action is put off for ever either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from model_check.end_promises import END_PROMISES
from model_check.explorer import Broken, Goal, Property, Question
from model_check.goals import GOALS
from model_check.node_promises import broken_by
from model_check.symmetry import anonymous
from spec.config import Idle
from spec.enabled import (
    Ambient,
    ambient_of,
    batcher_actions,
    local_actions,
    meetings,
    waits_for_exchange,
)
from spec.system import FAULTS, act_locally, exchange, gradient, initial_states
from spec.world import (
    FAITHFUL,
    Action,
    Activity,
    Exchange,
    Gradient,
    Node,
    State,
    StopEarly,
    World,
)


@dataclass(frozen=True)
class Reduction:
    """Which reductions to use."""

    symmetry: bool = False
    ample: bool = False


class Key(NamedTuple):
    """A state of the closed system, its nodes by their numbers."""

    nodes: tuple[int, ...]
    faults: int
    stops: int
    stop_after: int | None


class ClosedSystem:
    """A world as a model (see `model_check.explorer.Model`)."""

    def __init__(self, world: World, reduction: Reduction | None = None) -> None:
        self.world = world
        self.reduction = reduction or Reduction()
        self._nodes: list[Node] = []
        self._numbers: dict[Node, int] = {}
        self._broken: list[Broken | None] = []
        self._goals: list[frozenset[str]] = []
        self._local: dict[tuple[int, int, Ambient], tuple[Action, ...]] = {}
        self._after: dict[tuple[int, Action], int] = {}
        self._meeting: dict[tuple[int, ...], tuple[Action, ...]] = {}

    # ------------------------------------------------------------ numbers for nodes

    def number(self, node: Node) -> int:
        """The number of a node (under symmetry: of all that differ in the names of ranks only)."""
        if self.reduction.symmetry:
            node = anonymous(node, self.world.world_size)
        number = self._numbers.get(node)
        if number is None:
            number = self._numbers[node] = len(self._nodes)
            self._nodes.append(node)
            self._broken.append(broken_by(self.world, node))
            goals = (name for name, reached in GOALS.items() if reached(self.world, node))
            self._goals.append(frozenset(goals))
        return number

    def state(self, key: Key) -> State:
        """The state that a key stands for."""
        nodes = tuple(self._nodes[n] for n in key.nodes)
        return State(nodes, key.faults, key.stops, key.stop_after)

    def _key(self, nodes: Iterable[int], faults: int, stops: int, stop_after: int | None) -> Key:
        numbers = tuple(sorted(nodes)) if self.reduction.symmetry else tuple(nodes)
        return Key(numbers, faults, stops, stop_after)

    def goals_reached(self) -> frozenset[str]:
        """The goals that some state visited so far reaches."""
        return frozenset().union(*self._goals)

    # ------------------------------------------------------------ the model

    def initial(self) -> Iterator[Key]:
        for state in initial_states(self.world):
            numbers = [self.number(node) for node in state.nodes]
            yield self._key(numbers, state.faults, state.stops, state.stop_after)

    def actions(self, key: Key) -> list[Action]:
        ambient = self._ambient(key)
        if self.reduction.ample:
            for rank, number in enumerate(key.nodes):
                ample = self._ample(key, ambient, rank, number)
                if ample:
                    return list(ample)
        found: list[Action] = []
        for rank, number in enumerate(key.nodes):
            found.extend(self._local_actions(rank, number, ambient))
        found.extend(self._meetings(key))
        return found

    def perform(self, key: Key, action: Action) -> Key:
        if isinstance(action, Exchange | Gradient):
            nodes = tuple(self._nodes[n] for n in key.nodes)
            after = exchange(self.world, nodes) if isinstance(action, Exchange) else gradient(nodes)
            return self._key(map(self.number, after), key.faults, key.stops, key.stop_after)
        rank = action.rank
        number = key.nodes[rank]
        changed = self._after.get((number, action))
        if changed is None:
            node = act_locally(self.world, rank, self._nodes[number], action)
            changed = self._after[number, action] = self.number(node)
        return self._key(
            (*key.nodes[:rank], changed, *key.nodes[rank + 1 :]),
            key.faults - isinstance(action, FAULTS),
            max(0, key.stops - isinstance(action, StopEarly)),
            key.stop_after,
        )

    def _ambient(self, key: Key) -> Ambient:
        return ambient_of(self.state(key))

    def _local_actions(self, rank: int, number: int, ambient: Ambient) -> tuple[Action, ...]:
        index = (rank, number, ambient)
        found = self._local.get(index)
        if found is None:
            found = tuple(local_actions(self.world, ambient, rank, self._nodes[number]))
            self._local[index] = found
        return found

    def _meetings(self, key: Key) -> tuple[Action, ...]:
        found = self._meeting.get(key.nodes)
        if found is None:
            nodes = tuple(self._nodes[n] for n in key.nodes)
            found = self._meeting[key.nodes] = tuple(meetings(self.world, nodes))
        return found

    def _ample(
        self, key: Key, ambient: Ambient, rank: int, number: int
    ) -> tuple[Action, ...] | None:
        """A rank's actions, if nothing can reach it before it has taken one of them."""
        if key.faults or key.stops:
            return None  # ranks compete for what may go wrong
        node = self._nodes[number]
        if waits_for_exchange(node):
            return None  # an exchange may complete
        if self._may_return(node):
            return None  # others may let it begin its next epoch
        if node.trainer is not Activity.IN_GRADIENT:
            return self._local_actions(rank, number, ambient)
        faithful = self.world.habits == FAITHFUL  # the habits of a variant may look at the queue
        if faithful and key.stop_after is None and not ambient.someone_left:
            # A gradient may complete, after which the trainer takes a step. That does not get in
            # the way of the batcher, whichever comes first; and what a promise says of a rank
            # whose trainer is ahead of its batcher, it says before or after as well: a step that
            # leaves the queue takes nothing away from what is wrong with the rest.
            return tuple(batcher_actions(self.world, ambient, rank, node))
        return None

    def _may_return(self, node: Node) -> bool:
        """Whether a trainer that is through with an epoch may have its next one before it, and
        others can tell: under DDP's `Join` it waits until they are through as well, and they meet
        without it until it is back; and one that gave up breaks their gradient until then."""
        through = node.trainer in (Activity.DONE, Activity.STOPPED)
        another = node.machine.place.epoch + 1 < self.world.epochs
        joined = self.world.coupled and self.world.config.idle is Idle.STOP
        others_tell = joined or node.surrendered
        return through and another and others_tell and self.world.habits.may_begin(node)

    # ------------------------------------------------------------ what is asked of it

    def question(self, goals: Iterable[str] = ()) -> Question[Key]:
        """Every promise of behaviour over time, and the goals of these names."""
        return Question(
            properties=(Property(self._check_nodes), Property(self._check_end, at_end=True)),
            goals=[Goal(name, self._reached(name)) for name in goals],
            raises="step-alignment",
            terminates="bounded-termination",
        )

    def _check_nodes(self, key: Key) -> Broken | None:
        for rank, number in enumerate(key.nodes):
            broken = self._broken[number]
            if broken is not None:
                return Broken(broken.promise, f"rank {rank}: {broken.text}")
        return None

    def _check_end(self, key: Key) -> Broken | None:
        state = self.state(key)
        for name, promise in END_PROMISES:
            text = promise(self.world, state)
            if text is not None:
                return Broken(name, text)
        return None

    def _reached(self, name: str) -> Callable[[Key], bool]:
        return lambda key: any(name in self._goals[number] for number in key.nodes)
