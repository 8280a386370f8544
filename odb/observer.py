"""What an interpreter tells of its run to whoever wants to know: every event and every command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from spec.messages import Command, Event
from spec.rank import RankState


class Observer(Protocol):
    """Called in the driver's thread, between the commands; it must not raise."""

    def began(self, state: RankState, commands: Sequence[Command]) -> None:
        """The epoch starts; these commands come first."""

    def performs(self, command: Command) -> None:
        """A command is about to be carried out."""

    def failed(self, error: BaseException) -> None:
        """Carrying out a command raised this; the next event says what it means."""

    def fed(self, event: Event, state: RankState, commands: Sequence[Command]) -> None:
        """The state machine took an event; these are its new state and its commands."""

    def ended(self) -> None:
        """The last command has been performed."""

    def crashed(self, error: BaseException) -> None:
        """The run broke with an error that is no event of the protocol."""


class Nobody:
    """An observer that looks away."""

    def began(self, state: RankState, commands: Sequence[Command]) -> None:
        pass

    def performs(self, command: Command) -> None:
        pass

    def failed(self, error: BaseException) -> None:
        pass

    def fed(self, event: Event, state: RankState, commands: Sequence[Command]) -> None:
        pass

    def ended(self) -> None:
        pass

    def crashed(self, error: BaseException) -> None:
        pass


NOBODY = Nobody()
