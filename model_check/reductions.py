"""Compares the search with and without reductions: same verdicts, and how much smaller it gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from model_check.closed import ClosedSystem, Key, Reduction
from model_check.explorer import Broken, Limits, Property, Question, Verdict, explore
from model_check.profiles import Case
from model_check.symmetry import anonymous
from spec.world import World

COMBINATIONS: tuple[tuple[str, Reduction], ...] = (
    ("none", Reduction()),
    ("symmetry", Reduction(symmetry=True)),
    ("ample", Reduction(ample=True)),
    ("both", Reduction(symmetry=True, ample=True)),
)
"""Every combination of reductions, the unreduced search first."""


@dataclass(frozen=True)
class Reduced:
    """One search of one world.

    promise: the one that fell, if one did. goals: those reached. ends: the states in which nothing
    more can happen, without the names of ranks, so that those of different searches compare.
    """

    reduction: str
    verdict: Verdict
    promise: str | None
    states: int
    transitions: int
    seconds: float
    goals: frozenset[str]
    ends: frozenset[Hashable]


@dataclass(frozen=True)
class ReductionRow:
    """All searches of one case, in the order of `COMBINATIONS`."""

    case: str
    searches: tuple[Reduced, ...]

    @property
    def agree(self) -> bool:
        """Whether all searches came to the same verdict and, where they were exhaustive, to the
        same goals and the same ends up to the names of ranks."""
        first = self.searches[0]
        if any(other.verdict is not first.verdict for other in self.searches):
            return False
        if first.verdict is Verdict.REFUTED:
            return all(other.promise == first.promise for other in self.searches)
        return all(
            (other.goals, other.ends) == (first.goals, first.ends) for other in self.searches
        )

    def factor(self, reduction: str) -> float:
        """How many times fewer states a search visited than the unreduced one."""
        states = {search.reduction: search.states for search in self.searches}
        return states["none"] / states[reduction]


def compare(name: str, world: World, limits: Limits | None = None) -> ReductionRow:
    """Explore a world under every combination of reductions."""
    return ReductionRow(name, tuple(_search(world, *pair, limits) for pair in COMBINATIONS))


def reduction_table(cases: Sequence[Case], limits: Limits | None = None) -> list[ReductionRow]:
    """Explore every case under every combination of reductions, whatever its own is."""
    return [compare(case.name, case.world, limits) for case in cases]


def _search(world: World, name: str, reduction: Reduction, limits: Limits | None) -> Reduced:
    system = ClosedSystem(world, reduction)
    ends: set[Hashable] = set()

    def note(key: Key) -> Broken | None:
        ends.add(_nameless(system, key))
        return None

    asked = system.question()
    noting = Question(
        (Property(note, at_end=True), *asked.properties), (), asked.raises, asked.terminates
    )
    found = explore(system, noting, limits)
    return Reduced(
        reduction=name,
        verdict=found.verdict,
        promise=None if found.violation is None else found.violation.promise,
        states=found.states,
        transitions=found.transitions,
        seconds=found.seconds,
        goals=system.goals_reached(),
        ends=frozenset(ends),
    )


def _nameless(system: ClosedSystem, key: Key) -> Hashable:
    """A state without the names of ranks: how many ranks are in each state, and the rest."""
    state = system.state(key)
    ranks = Counter(anonymous(node, system.world.world_size) for node in state.nodes)
    return frozenset(ranks.items()), state.faults, state.stops, state.stop_after
