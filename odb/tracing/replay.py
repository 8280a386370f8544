"""Replays one rank's trace through the spec: the same events must give the same commands."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from odb.tracing import wording
from odb.tracing.encoding import state_to_json
from odb.tracing.reading import Line, RankTrace
from odb.tracing.report import Divergence, Kind
from spec.errors import ODBError
from spec.messages import (
    Arrived,
    Closed,
    Command,
    Emit,
    Emitted,
    End,
    Event,
    Failed,
    InputEnded,
    PeerLost,
    PostCounts,
    PostReport,
    Pull,
    ShareSpare,
    Tallied,
    Totalled,
)
from spec.rank import Phase, RankState, Setup, Transition, start, transition

ANSWERS: dict[type[Command], tuple[type[Event], ...]] = {
    Pull: (Arrived, InputEnded, Failed, Closed, PeerLost),
    PostReport: (Tallied, PeerLost),
    PostCounts: (Totalled, PeerLost),
    ShareSpare: (PeerLost,),
    Emit: (Emitted, Failed, Closed, PeerLost),
}
"""The events by which the last command that was begun may be answered (see `spec.messages`); the
link may break in any that waits. Whether the phase accepts the event is for the spec to say."""


class Replayed(NamedTuple):
    """How a rank's trace compares. transitions: how many lines agree. exchanges: how many results
    of exchanges the rank had taken before the line that does not."""

    transitions: int
    divergence: Divergence | None
    exchanges: int


def replay(trace: RankTrace) -> Replayed:
    """Replay a whole trace, up to the first line that is not the spec's."""
    return _Replay(trace).run()


class _Apart(Exception):
    """The trace and the spec part."""

    def __init__(self, kind: Kind, line: int, spec: str, trace: str) -> None:
        super().__init__(spec, trace)
        self.kind, self.line, self.spec, self.trace = kind, line, spec, trace


class _Replay:
    def __init__(self, trace: RankTrace) -> None:
        header = trace.header
        self._trace = trace
        self._setup = Setup(header.config, header.rank, header.world_size)
        self._state: RankState
        self._given: tuple[Command, ...] = ()
        self._exchanges = 0
        self._done = 0

    def run(self) -> Replayed:
        apart = None
        try:
            for line in self._trace.lines:
                self._line(line)
                self._done += 1
            self._end()
        except _Apart as found:
            apart = self._divergence(found)
        return Replayed(self._done, apart, self._exchanges)

    def _line(self, line: Line) -> None:
        if line.event is None:
            expected = start(self._setup, self._trace.header.epoch)
        else:
            self._answer(line, line.event)
            self._exchanges += isinstance(line.event, Tallied | Totalled)
            expected = self._transition(line, line.event)
        self._state = expected.state
        self._compare(line.number, expected.commands, line.commands)
        self._summary(line.number, line.state)
        self._given = expected.commands

    def _answer(self, line: Line, event: Event) -> None:
        """The event must answer what the spec asked for, after all commands were begun."""
        begun = self._given if line.begun is None else line.begun
        broke_off = isinstance(event, PeerLost) and begun == self._given[: len(begun)]
        if begun != self._given and not broke_off:
            said = wording.commands(begun)
            raise _Apart(Kind.PERFORMED, line.number, wording.commands(self._given), said)
        asked = begun[-1] if begun else None
        allowed = ANSWERS.get(type(asked), ()) if asked is not None else ()
        if not isinstance(event, allowed):
            if asked is None:
                spec = "waits for no event any more"
            elif allowed:
                names = wording.alternatives(kind.__name__ for kind in allowed)
                spec = f"{wording.command(asked)} and waits for {names}"
            else:
                spec = f"{wording.command(asked)} and waits for no event"
            raise _Apart(Kind.EVENT, line.number, spec, wording.event(event))

    def _transition(self, line: Line, event: Event) -> Transition:
        try:
            return transition(self._setup, self._state, event)
        except (ODBError, ValueError) as error:
            text = f"refuses it ({error})"
            raise _Apart(Kind.EVENT, line.number, text, wording.event(event)) from None

    def _compare(self, number: int, spec: Sequence[Command], trace: Sequence[Command]) -> None:
        for ours, theirs in zip_longest(spec, trace):
            if ours != theirs:
                said = "nothing more" if theirs is None else wording.command(theirs)
                want = "does nothing more here" if ours is None else wording.command(ours)
                if ours is not None and theirs is not None and want == said:
                    want, said = wording.in_detail(ours), wording.in_detail(theirs)
                raise _Apart(Kind.COMMAND, number, want, said)

    def _summary(self, number: int, said: object) -> None:
        if said is None:
            return
        ours = state_to_json(self._state)
        if ours != said:
            want, found = wording.states(ours, said)
            raise _Apart(Kind.STATE, number, f"has {want}", found)

    def _end(self) -> None:
        trace = self._trace
        last = trace.lines[-1].number if trace.lines else 1
        if trace.crash is not None:
            raise _Apart(Kind.CRASH, last, "has no such event", f"odb broke with {trace.crash}")
        if trace.end is None:
            return
        if not trace.lines:
            raise _Apart(Kind.END, trace.end.number, "starts the epoch", "the epoch has ended")
        outcome = trace.end.outcome
        if self._state.phase is not Phase.ENDED:
            spec = f"is still {self._state.phase.value}"
            raise _Apart(Kind.END, trace.end.number, spec, wording.command(End(outcome)))
        if self._given[-1:] != (End(outcome),):
            spec = wording.commands(self._given[-1:])
            raise _Apart(Kind.END, trace.end.number, spec, wording.command(End(outcome)))
        self._summary(trace.end.number, trace.end.state)
        if trace.beyond is not None:
            raise _Apart(Kind.END, trace.beyond, "has ended the epoch", "the rank goes on")

    def _divergence(self, apart: _Apart) -> Divergence:
        round_ = step = 0
        if self._done:
            place, pending = self._state.place, self._state.pending
            round_ = pending[0].round if pending else place.round
            step = pending[0].number if pending else place.step
        return Divergence(
            kind=apart.kind,
            path=self._trace.path,
            line=apart.line,
            rank=self._trace.rank,
            round=round_,
            step=step,
            spec=apart.spec,
            trace=apart.trace,
        )
