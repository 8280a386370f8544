"""Builds the real loader of a changed protocol (see `spec.variants`), to see it fail.

    with protocol(VARIANTS["carry-dropped"]):
        for batch in ODBDataLoader(...):  # loses samples

Changed rules and machines are plugged in as they are. A changed habit is about what the loader does
around the protocol, so it has a counterpart here: a changed outbox or session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from odb.errors import ConfigError
from odb.interpreter import Interpreter
from odb.outbox import Outbox
from odb.parts import Parts, built_of
from odb.session import Session
from spec.messages import Event
from spec.rank import Transition, transition
from spec.variants import Variant, habits
from spec.world import FAITHFUL, Machine


class LeftAsItIs(Outbox[Any]):
    """A trainer that stops does not release the slots."""

    def close(self) -> None:
        pass


class OvertakenByErrors(Outbox[Any]):
    """An error is raised before the steps that are queued."""

    def finish(self, error: BaseException | None = None) -> bool:
        with self._changed:
            if error is not None:
                self._items.clear()
            return super().finish(error)


class LosesItsEnd(Outbox[Any]):
    """The end is lost if a step is queued."""

    def finish(self, error: BaseException | None = None) -> bool:
        with self._changed:
            return False if self._items else super().finish(error)


class KeepsItsSteps(Outbox[Any]):
    """Steps stay queued when a peer is lost, and the error comes behind them."""

    def fail(self, error_at: Callable[[int], BaseException]) -> list[Any]:
        with self._changed:
            self._dropped = True
            self.finish(error_at(self.taken))
            self._changed.notify_all()
        return []


class OneMore(Outbox[Any]):
    """It takes one step more than it has room for."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity + 1)


class Overlapping(Session):
    """The next epoch begins whatever the driver is doing."""

    def finish_epoch(self, timeout: float | None = None) -> bool:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.stop()
        return True


@dataclass(frozen=True)
class Counterpart:
    """What is changed in the loader where a habit is changed in the closed system."""

    outbox: type[Outbox[Any]] = Outbox
    session: type[Session] = Session


COUNTERPARTS: Mapping[Callable[..., Any], Counterpart] = {
    habits.walk_away: Counterpart(outbox=LeftAsItIs),
    habits.drop_queue_on_error: Counterpart(outbox=OvertakenByErrors),
    habits.keep_queue: Counterpart(outbox=KeepsItsSteps),
    habits.lose_the_end: Counterpart(outbox=LosesItsEnd),
    habits.room_for_one_more: Counterpart(outbox=OneMore),
    habits.begin_at_once: Counterpart(session=Overlapping),
}
"""By the changed habit."""

NO_COUNTERPART: Mapping[str, str] = {}
"""Variants that the real loader cannot be made to follow, by name, with the reason."""


def parts_of(variant: Variant) -> Parts:
    """The parts of a loader that follows this variant. Raises ConfigError for a changed habit that
    has no counterpart."""
    changed = [
        getattr(variant.habits, field.name)
        for field in fields(variant.habits)
        if getattr(variant.habits, field.name) is not getattr(FAITHFUL, field.name)
    ]
    if len(changed) > 1 or not set(changed) <= set(COUNTERPARTS):
        raise ConfigError(f"nothing in the loader corresponds to {variant.description!r}")
    counterpart = COUNTERPARTS[changed[0]] if changed else Counterpart()
    return Parts(
        rules=variant.rules,
        interpreter=interpreter_for(variant.machine),
        outbox=counterpart.outbox,
        session=counterpart.session,
    )


def interpreter_for(machine: Machine) -> type[Interpreter]:
    """An interpreter that runs a changed state machine."""
    if machine is transition:
        return Interpreter

    class Changed(Interpreter):
        def transition(self, event: Event) -> Transition:
            return machine(self._setup, self.state, event)

    return Changed


@contextmanager
def protocol(variant: Variant) -> Iterator[None]:
    """Loaders that begin an epoch in this thread meanwhile follow the variant."""
    with built_of(parts_of(variant)):
        yield
