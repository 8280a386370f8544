"""What staged ranks share, bounded waits for them, and the place at which a driver waits."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from odb.errors import ODBError
from odb.observer import Observer
from spec.messages import Arrived, Command, Emit, Emitted, End, Event, GiveUp, Outcome, Pull, Step
from spec.rank import RankState

PATIENCE_S = 20.0
"""How long something may take that nothing keeps from happening."""


class Killed(ODBError):
    """The process of this rank has died: this is how its threads end."""


class NotReachedError(ODBError, TimeoutError):
    """A rank did not get where it had to. The message says where its threads were."""


class Stage:
    """One lock for all ranks, and a count of everything that they do."""

    def __init__(self, patience: float = PATIENCE_S) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.moves = 0
        self.acting = threading.local()
        self.patience = patience

    def moved(self) -> None:
        """Something has happened."""
        with self.changed:
            self.moves += 1
            self.changed.notify_all()

    def wait_for(
        self, what: str, reached: Callable[[], bool], threads: Sequence[threading.Thread | None]
    ) -> None:
        """Wait until a condition holds. Raises NotReachedError if nothing brings it about."""
        with self.changed:
            there = self.changed.wait_for(reached, self.patience)
        if not there:
            stacks = "\n".join(stack_of(thread) for thread in threads if thread is not None)
            raise NotReachedError(f"{what}: not after {self.patience:g} s\n{stacks}")


def stack_of(thread: threading.Thread) -> str:
    """Where a thread is, as `faulthandler` says it."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return f"{thread.name} has ended"
    return f"{thread.name}:\n" + "".join(traceback.format_stack(frame))


class Standing(Enum):
    """Where a driver is."""

    RUNNING = "on its way"
    BEFORE = "about to perform a command"
    MEETING = "in an exchange"
    ENDED = "through with the epoch"
    CRASHED = "ended by an error that is no event of the protocol"


@dataclass
class Call:
    """An exchange that a driver is in. `result`: what it gives, once all are in it; the driver
    does not look at it before it is told to (`received`)."""

    name: str
    value: Any
    result: Any = None
    complete: bool = False
    received: bool = False


class Actor:
    """The driver of one rank in one epoch, as its observer. It waits before each pull and each
    emission, and in each exchange.

    state, commands: the state machine's, and the commands still to be performed, the one at hand
    first. outcome, surrendered: how the epoch ended, and whether the trainer was given up.
    entered: the round in which each sample arrived. put: the steps that are in the outbox, or were.
    """

    def __init__(self, stage: Stage, inner: Observer) -> None:
        self._stage = stage
        self._inner = inner
        self._commands: tuple[Command, ...] = ()
        self._begun = 0
        self._go = False
        self._dead = False
        self.state: RankState | None = None
        self.standing = Standing.RUNNING
        self.thread: threading.Thread | None = None
        self.call: Call | None = None
        self.error: BaseException | None = None
        self.outcome: Outcome | None = None
        self.surrendered = False
        self.entered: list[int] = []
        self.put: list[Step] = []

    @property
    def commands(self) -> tuple[Command, ...]:
        """The commands still to be performed."""
        return self._commands[max(0, self._begun - 1) :]

    # ------------------------------------------------------------ told by the schedule

    def go_on(self) -> None:
        """Perform the command at hand."""
        with self._stage.changed:
            if self.standing is not Standing.BEFORE:
                raise NotReachedError(f"a driver is {self.standing.value}, not before a command")
            self.standing = Standing.RUNNING
            self._go = True
            self._stage.moved()

    def receive(self) -> None:
        """Look at the result of the exchange."""
        with self._stage.changed:
            if self.call is None or not self.call.complete:
                raise NotReachedError(f"a driver is {self.standing.value}, and has no result")
            self.standing = Standing.RUNNING
            self.call.received = True
            self._stage.moved()

    def disturb(self) -> None:
        """Look around, wherever it waits: the exchange is broken."""
        with self._stage.changed:
            if self.standing is Standing.BEFORE:
                self._go = True
            if self.standing in (Standing.BEFORE, Standing.MEETING):
                self.standing = Standing.RUNNING
            self._stage.moved()

    def kill(self) -> None:
        """End, wherever it waits."""
        with self._stage.changed:
            self._dead = True
            self._stage.moved()

    @property
    def settled(self) -> bool:
        """Whether it goes no further by itself."""
        return self.standing is not Standing.RUNNING

    @property
    def through(self) -> bool:
        """Whether it performs nothing any more; its thread may still be about to end."""
        return self.standing in (Standing.ENDED, Standing.CRASHED)

    # ------------------------------------------------------------ in the driver's thread

    def wait_in(self, call: Call, broken: Callable[[], bool]) -> Any:
        """Wait in an exchange until it is received or broken; its result."""
        with self._stage.changed:
            self.call = call
            self.standing = Standing.MEETING
            self._stage.moved()
            self._stage.changed.wait_for(lambda: call.received or self._dead or broken())
            self.call = None
            self._live()
            return call.result

    def _live(self) -> None:
        if self._dead:
            raise Killed

    def began(self, state: RankState, commands: Sequence[Command]) -> None:
        self._stage.acting.actor = self
        self.thread = threading.current_thread()
        self._inner.began(state, commands)
        with self._stage.changed:
            self.state, self._commands, self._begun = state, tuple(commands), 0

    def performs(self, command: Command) -> None:
        self._inner.performs(command)
        with self._stage.changed:
            self._begun += 1
            match command:
                case Pull() | Emit():
                    self.standing = Standing.BEFORE
                    self._stage.moved()
                    self._stage.changed.wait_for(lambda: self._go or self._dead)
                    self._go = False
                    self._live()
                case GiveUp():
                    self.surrendered = True
                case End(outcome):
                    self.outcome = outcome

    def failed(self, error: BaseException) -> None:
        self._inner.failed(error)

    def fed(self, event: Event, state: RankState, commands: Sequence[Command]) -> None:
        self._inner.fed(event, state, commands)
        with self._stage.changed:
            assert self.state is not None
            match event, self.commands[:1]:
                case Arrived(arrived), _:
                    self.entered += [self.state.place.round] * len(arrived)
                case Emitted(), (Emit(step),):
                    self.put.append(step)
            self.state, self._commands, self._begun = state, tuple(commands), 0
            self._stage.moved()

    def ended(self) -> None:
        self._inner.ended()
        with self._stage.changed:
            self._commands, self._begun = (), 0
            self.standing = Standing.ENDED
            self._stage.moved()

    def crashed(self, error: BaseException) -> None:
        self._inner.crashed(error)
        with self._stage.changed:
            self.error = error
            self.standing = Standing.CRASHED
            self._stage.moved()
