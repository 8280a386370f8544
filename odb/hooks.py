"""Where tests get into the loader: a few places at which something may be made to happen.

Nothing is called unless hooks are installed, and only `odb.testing` installs any. A hook stands for
the surroundings of the loader: what it raises, or how long it takes, counts as if the dataset, the
collate function, the network or the trainer had done so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from odb.errors import ConfigError
from odb.info import SampleId
from odb.observer import Observer
from spec.messages import Command, Event, PostReport
from spec.rank import RankState


class Hooks(Protocol):
    """Those of one rank. They go to its worker processes, so they must be picklable; equal ones
    must compare equal, as workers that persist are started anew when they have changed."""

    def on_sample(self, sample_id: SampleId) -> None:
        """A sample was read and is measured next: in the process that reads. What this raises is
        the sample's error."""

    def on_batch(self, epoch: int, step: int) -> None:
        """A step's samples are collated next: in the driver's thread. What this raises is the
        collate function's error."""

    def on_exchange(self, epoch: int, round_: int) -> None:
        """A round's report is posted next: in the driver's thread. Must not raise."""

    def on_step(self, epoch: int, step: int) -> None:
        """The trainer asks for a step: in its own thread. It gets what this raises."""


class NoHooks:
    """Nothing happens."""

    def on_sample(self, sample_id: SampleId) -> None:
        pass

    def on_batch(self, epoch: int, step: int) -> None:
        pass

    def on_exchange(self, epoch: int, round_: int) -> None:
        pass

    def on_step(self, epoch: int, step: int) -> None:
        pass


NO_HOOKS: Hooks = NoHooks()

HooksOfRank = Callable[[int], Hooks]

_INSTALLED: list[HooksOfRank] = []


@contextmanager
def installed(hooks_of: HooksOfRank) -> Iterator[None]:
    """Every epoch that begins in this process meanwhile has the hooks for its (global) rank."""
    if _INSTALLED:
        raise ConfigError("hooks are installed in this process already")
    _INSTALLED.append(hooks_of)
    try:
        yield
    finally:
        _INSTALLED.remove(hooks_of)


def hooks_of(rank: int) -> Hooks:
    """The hooks for an epoch of this rank that begins now."""
    return _INSTALLED[-1](rank) if _INSTALLED else NO_HOOKS


class HookedObserver:
    """Passes on what it sees, and calls the hook for an exchange before it begins."""

    def __init__(self, inner: Observer, hooks: Hooks) -> None:
        self._inner = inner
        self._hooks = hooks
        self._state: RankState | None = None

    def began(self, state: RankState, commands: Sequence[Command]) -> None:
        self._state = state
        self._inner.began(state, commands)

    def performs(self, command: Command) -> None:
        self._inner.performs(command)
        if isinstance(command, PostReport) and self._state is not None:
            self._hooks.on_exchange(self._state.place.epoch, self._state.place.round)

    def failed(self, error: BaseException) -> None:
        self._inner.failed(error)

    def fed(self, event: Event, state: RankState, commands: Sequence[Command]) -> None:
        self._state = state
        self._inner.fed(event, state, commands)

    def ended(self) -> None:
        self._inner.ended()

    def crashed(self, error: BaseException) -> None:
        self._inner.crashed(error)
