"""What a variant is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spec.rank import Rules, transition
from spec.world import FAITHFUL, SHIPPED, Habits, Machine, World


@dataclass(frozen=True)
class Variant:
    """A protocol with something changed.

    description: what is changed, in one line. falls: the promise that breaks (or one of several,
    where it depends on the world which breaks first). rules, machine, habits: the changed parts.
    """

    description: str
    falls: tuple[str, ...]
    rules: Rules = SHIPPED
    machine: Machine = transition
    habits: Habits = FAITHFUL

    def within(self, world: World) -> World:
        """The world with this protocol in it."""
        return replace(world, rules=self.rules, machine=self.machine, habits=self.habits)
