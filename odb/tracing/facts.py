"""What a trace says that happened on a rank: read off its events and commands, without the spec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from odb.info import SampleId
from odb.tracing.reading import Line, RankTrace
from spec.lockstep import RankRecord
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
    PeerLost,
    PostCounts,
    PostReport,
    Retire,
    ShareReason,
    ShareSpare,
    Tallied,
    Totalled,
)
from spec.samples import Sample

Collective = PostReport | PostCounts | ShareSpare | ShareReason


@dataclass(frozen=True)
class Exchanged:
    """One collective on one rank. result: what it was told, None if nothing (yet). posted_at,
    told_at: the numbers of the lines."""

    command: Collective
    posted_at: int
    result: Event | None
    told_at: int | None
    round: int
    step: int


@dataclass
class RankFacts:
    """One rank's epoch. record: as `spec.lockstep` keeps it; `held` is what has arrived and was
    neither filtered nor emitted. failed: the step before which something broke here. retired: it
    left by idle stop. excused: why it may have taken fewer steps than others, or None."""

    trace: RankTrace
    record: RankRecord
    arrived: list[Sample] = field(default_factory=list)
    ids: dict[int, SampleId] = field(default_factory=dict)
    exchanges: list[Exchanged] = field(default_factory=list)
    rounds: int = 0
    failed: int | None = None
    retired: bool = False
    excused: str | None = None

    @property
    def sound(self) -> bool:
        """Whether only samples that have arrived were filtered and emitted, so that these can be
        judged."""
        there = set(self.arrived)
        out = [*self.record.filtered, *(s for step in self.record.steps for s in step.group)]
        numbered = [s.seq for s in self.arrived] == list(range(len(self.arrived)))
        return numbered and all(s in there for s in out)


def facts_of(trace: RankTrace) -> RankFacts:
    """Everything that is judged."""
    scribe = _Scribe(trace)
    for before, line in _pairs(trace.lines):
        scribe.take(before, line)
    return scribe.finish()


def _pairs(lines: list[Line]) -> Iterator[tuple[Line | None, Line]]:
    before = None
    for line in lines:
        yield before, line
        before = line


class _Scribe:
    def __init__(self, trace: RankTrace) -> None:
        self.facts = RankFacts(trace, RankRecord())
        self._round = 0
        self._out = 0

    def take(self, before: Line | None, line: Line) -> None:
        """Note what the commands of the line before did, now that it is known what came of them,
        and what the event says."""
        if before is not None:
            begun = before.commands if line.begun is None else line.begun
            for command in begun:
                self._performed(command, before, line)
        facts, record = self.facts, self.facts.record
        match line.event:
            case Arrived(samples):
                facts.arrived += samples
                facts.ids.update(zip((s.seq for s in samples), line.ids, strict=True))
                record.entered += [self._round] * len(samples)
                filtered = sum(isinstance(command, Filter) for command in line.commands)
                held = len(facts.arrived) - self._out - filtered
                record.most_held = max(record.most_held, held)
            case Tallied():
                facts.rounds += 1
                if not any(isinstance(c, PostCounts | ShareSpare | End) for c in line.commands):
                    self._round += 1  # a round without counts: the last block is emitted
            case Totalled():
                self._round += 1
            case Failed() if facts.failed is None:
                facts.failed = len(record.steps)
            case Closed():
                facts.excused = "its trainer stopped early"
            case PeerLost():
                facts.excused = "it lost another rank"
            case _:
                pass

    def _performed(self, command: Command, given: Line, then: Line | None) -> None:
        facts, record = self.facts, self.facts.record
        event = None if then is None else then.event
        match command:
            case Emit(step) if isinstance(event, Emitted):
                record.steps.append(step)
                self._out += len(step.group)
            case Filter(sample):
                record.filtered.append(sample)
                self._out += 1
            case Retire():
                facts.retired = True
                facts.excused = "it retired (idle stop)"
            case GiveUp():
                facts.excused = "it could not make even an idle step"
            case PostReport() | PostCounts() | ShareSpare() | ShareReason():
                told = isinstance(command, PostReport) and isinstance(event, Tallied)
                told = told or (isinstance(command, PostCounts) and isinstance(event, Totalled))
                result, at = (event, then.number) if told and then is not None else (None, None)
                place = (self._round, len(record.steps))
                facts.exchanges.append(Exchanged(command, given.number, result, at, *place))
            case _:
                pass

    def finish(self) -> RankFacts:
        """What is left: the commands of the last line, and what is still held."""
        facts, record, trace = self.facts, self.facts.record, self.facts.trace
        if trace.lines:
            last = trace.lines[-1]
            for command in last.commands:
                self._performed(command, last, None)
        if trace.end is None:
            facts.excused = facts.excused or "its trace breaks off"
        else:
            record.outcome = trace.end.outcome
        if facts.excused is not None:
            record.retired_after = len(record.steps)
        out = {s for step in record.steps for s in step.group} | set(record.filtered)
        record.held = tuple(s for s in facts.arrived if s not in out)
        return facts
