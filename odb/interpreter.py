"""Drives one rank's state machine: performs its commands and feeds back their events.

Takes no decision of its own. What a command means outside the protocol (where samples come from,
where steps go) is the `Shell`'s business: the loader has one, `plan_microbatches` another.
"""

from __future__ import annotations

from itertools import chain
from typing import Protocol

from odb.observer import NOBODY, Observer
from odb.transport import LinkBroken, LinkLost, Transport
from spec.exchange import decode, encode
from spec.messages import (
    Arrived,
    Closed,
    Command,
    Emit,
    Emitted,
    End,
    Event,
    Failed,
    Filter,
    GiveUp,
    InputEnded,
    KeepSpare,
    Outcome,
    PeerLost,
    PostCounts,
    PostReport,
    Pull,
    Retire,
    ShareReason,
    ShareSpare,
    Step,
    Tallied,
    Totalled,
)
from spec.rank import RankState, Setup, Transition, start, transition
from spec.samples import Counts, Sample

COUNT_FIELDS = len(Counts._fields)


class Shell(Protocol):
    """The effects of one rank's commands. `pull` and `emit` may raise: that is `Failed`, or with
    LinkBroken `PeerLost`."""

    def pull(self, first_seq: int, limit: int) -> tuple[Sample, ...] | None:
        """Up to `limit` samples numbered from `first_seq`; empty at the end of the input; None if
        the trainer has stopped."""

    def emit(self, step: Step) -> bool:
        """Make the step's batch and hand it over; False if the trainer has stopped."""

    def filter(self, sample: Sample) -> None:
        """Let go of a sample that is not trained on, and list it."""

    def keep_spare(self, sample: Sample) -> None:
        """Remember this sample's content for idle steps."""

    def share_spare(self, donor: int) -> None:
        """Send the spare to all (the donor) or take it (a rank without one)."""

    def share_reason(self, rank: int) -> None:
        """Tell all why this rank failed, or hear it from `rank`. Must not raise LinkBroken: the
        epoch has ended already."""

    def retire(self) -> None:
        """End the trainer's iteration; the exchange goes on."""

    def give_up(self, state: RankState) -> None:
        """End the trainer's iteration with what `failed` was told; the exchange goes on."""

    def end(self, outcome: Outcome, state: RankState) -> None:
        """The epoch is over."""

    def failed(self, error: BaseException) -> None:
        """Remember what `pull` or `emit` raised."""

    def lost(self, error: LinkBroken) -> None:
        """Remember how an exchange broke."""


class Interpreter:
    """Runs one rank through one epoch, under the eyes of an observer."""

    def __init__(
        self,
        setup: Setup,
        epoch: int,
        shell: Shell,
        transport: Transport,
        observer: Observer = NOBODY,
    ) -> None:
        self._setup = setup
        self._shell = shell
        self._transport = transport
        self._observer = observer
        self.state, self._commands = start(setup, epoch)

    def run(self) -> None:
        """Perform commands until the epoch has ended. Every other command but the last asks for
        exactly one event, and it is the last of its transition."""
        try:
            self._observer.began(self.state, self._commands)
            self._run()
        except BaseException as error:
            self._observer.crashed(error)
            raise
        self._observer.ended()

    def _run(self) -> None:
        while self._commands:
            event = self._perform_all()
            if event is None:
                return
            self.state, self._commands = self.transition(event)
            self._observer.fed(event, self.state, self._commands)

    def transition(self, event: Event) -> Transition:
        """The one way in which the state changes: that of the protocol."""
        return transition(self._setup, self.state, event)

    def _perform_all(self) -> Event | None:
        event: Event | None = None
        for command in self._commands:
            self._observer.performs(command)
            self._transport.activity.begin(command, self.state)
            try:
                event = self._perform(command)
            except LinkBroken as error:
                self._observer.failed(error)
                self._shell.lost(error)
                return PeerLost(error.rank if isinstance(error, LinkLost) else None)
        return event

    def _perform(self, command: Command) -> Event | None:
        shell = self._shell
        match command:
            case Pull(limit):
                return self._pull(limit)
            case Emit(step):
                return self._emit(step)
            case PostReport() | PostCounts():
                return self._exchange(command)
            case Filter(sample):
                shell.filter(sample)
            case KeepSpare(sample):
                shell.keep_spare(sample)
            case ShareSpare(donor):
                shell.share_spare(donor)
            case ShareReason(rank):
                shell.share_reason(rank)
            case Retire():
                shell.retire()
            case GiveUp():
                shell.give_up(self.state)
            case End(outcome):
                shell.end(outcome, self.state)
        return None

    def _pull(self, limit: int) -> Event:
        try:
            samples = self._shell.pull(self.state.arrived, limit)
        except LinkBroken:
            raise
        except BaseException as error:  # in a thread, nobody else would tell the other ranks
            self._observer.failed(error)
            self._shell.failed(error)
            return Failed()
        if samples is None:
            return Closed()
        return Arrived(samples) if samples else InputEnded()

    def _emit(self, step: Step) -> Event:
        try:
            return Emitted() if self._shell.emit(step) else Closed()
        except LinkBroken:
            raise
        except BaseException as error:
            self._observer.failed(error)
            self._shell.failed(error)
            return Failed()

    def _exchange(self, command: PostReport | PostCounts) -> Event:
        if isinstance(command, PostReport):
            return Tallied(decode(self._transport.maximum(encode(command.tally))))
        flat = self._transport.total(tuple(chain.from_iterable(command.counts)))
        totals = (flat[i : i + COUNT_FIELDS] for i in range(0, len(flat), COUNT_FIELDS))
        return Totalled(tuple(Counts(*total) for total in totals))
