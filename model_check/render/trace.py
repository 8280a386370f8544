"""A run of the closed system that breaks a promise, with its states whole and its ranks named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from model_check.closed import ClosedSystem, Key
from model_check.end_promises import END_PROMISES
from model_check.mutants import Fall
from model_check.node_promises import NODE_PROMISES
from spec.system import act, initial_states
from spec.world import Action, Exchange, Gradient, State, World


@dataclass(frozen=True)
class Trace:
    """title: what was explored. promise, text: what broke, and how (empty: nothing did).
    `actions[i]` leads from `states[i]` to `states[i + 1]`; if there is no such state, that last
    action raised. repeats: where the run can go round for ever, the number of the state to which
    it comes back."""

    title: str
    promise: str
    text: str
    world: World
    states: tuple[State, ...]
    actions: tuple[Action, ...]
    repeats: int | None = None

    def __post_init__(self) -> None:
        if len(self.actions) - len(self.states) not in (-1, 0):
            raise ValueError(f"{len(self.states)} states do not fit {len(self.actions)} actions")

    @property
    def raised(self) -> bool:
        """Whether the last action led to no state, as a function of the protocol raised."""
        return len(self.actions) == len(self.states)


def trace_of(fall: Fall, title: str) -> Trace:
    """The run by which a variant fell, performed once more by `spec.system` itself.

    A search under symmetry knows ranks up to their names only. Here every rank keeps one name, so
    that who does what can be followed from state to state.
    """
    system, found = fall.system, fall.violation
    world = system.world
    state = next(s for s in initial_states(world) if _key(system, s) == found.states[0])
    ranks = _seats(system, state, found.states[0])
    states, actions = [state], []
    for action, key in zip(found.actions, found.states[1:], strict=False):
        action = _renamed(action, ranks)
        state = act(world, state, action)
        ranks = _seats(system, state, key)
        states.append(state)
        actions.append(action)
    if len(found.actions) == len(found.states):
        actions.append(_renamed(found.actions[-1], ranks))
    trace = Trace(
        title, found.promise, found.text, world, tuple(states), tuple(actions), found.repeats
    )
    if trace.raised or not system.reduction.symmetry:
        return trace
    texts = (text for promise, text in _broken(world, state) if promise == trace.promise)
    return replace(trace, text=next(texts, trace.text))


def _key(system: ClosedSystem, state: State) -> Key:
    numbers = [system.number(node) for node in state.nodes]
    if system.reduction.symmetry:
        numbers.sort()
    return Key(tuple(numbers), state.faults, state.stops, state.stop_after)


def _seats(system: ClosedSystem, state: State, key: Key) -> list[int]:
    """For each place in a key of the search, the rank that sits there in the state."""
    if _key(system, state) != key:
        raise AssertionError("the run cannot be performed again")
    free = list(range(len(state.nodes)))
    if not system.reduction.symmetry:
        return free
    seats = []
    for number in key.nodes:
        rank = next(r for r in free if system.number(state.nodes[r]) == number)
        free.remove(rank)
        seats.append(rank)
    return seats


def _renamed(action: Action, ranks: Sequence[int]) -> Action:
    if isinstance(action, Exchange | Gradient):
        return action
    return replace(action, rank=ranks[action.rank])


def _broken(world: World, state: State) -> Iterator[tuple[str, str]]:
    """Every promise that a state breaks, and how, with the ranks' names."""
    for rank, node in enumerate(state.nodes):
        for name, promise in NODE_PROMISES:
            text = promise(world, node)
            if text is not None:
                yield name, f"rank {rank}: {text}"
    for name, end_promise in END_PROMISES:
        text = end_promise(world, state)
        if text is not None:
            yield name, text
