"""A recorded run as a table: a column for each rank, and the exchanges across all of them.

Between two exchanges ranks do not influence each other, so that what they do there stands side by
side, each cell with its own time. An exchange completes for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from model_check.render import words
from model_check.render.sentences import tally_words
from odb.tracing import wording
from odb.tracing.exchanges import WHAT
from odb.tracing.reading import EpochTraces, Line, RankTrace
from spec.messages import (
    Arrived,
    Closed,
    Command,
    Emit,
    Emitted,
    Event,
    Failed,
    Filter,
    GiveUp,
    InputEnded,
    PeerLost,
    PostCounts,
    PostReport,
    Retire,
    ShareReason,
    ShareSpare,
    Tallied,
    Totalled,
)


@dataclass(frozen=True)
class Cell:
    """What a rank does, how many seconds into its epoch, in which round and before or in which
    step."""

    time: float
    text: str
    round: int
    step: int


@dataclass(frozen=True)
class Row:
    """Cells of ranks (by rank; None: nothing), or an exchange of all of them."""

    cells: tuple[Cell | None, ...]
    exchange: str | None = None

    @property
    def round(self) -> int:
        """The round that it is in."""
        return max(cell.round for cell in self.cells if cell is not None)

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step that it is at."""
        steps = [cell.step for cell in self.cells if cell is not None]
        return min(steps), max(steps)


@dataclass
class _Part:
    """What a rank does up to the end of an exchange, and that."""

    cells: list[Cell]
    meeting: Cell | None = None


def timeline(traces: EpochTraces) -> tuple[Row, ...]:
    """All rows of an epoch. A rank without a trace has an empty column."""
    columns = [
        list(_parts(traces.ranks[rank])) if rank in traces.ranks else []
        for rank in range(traces.world_size)
    ]
    rows: list[Row] = []
    for parts in zip_longest(*columns):
        cells = [part.cells if part is not None else [] for part in parts]
        rows += (Row(row) for row in zip_longest(*cells))
        meetings = [part.meeting if part is not None else None for part in parts]
        texts = {cell.text for cell in meetings if cell is not None}
        if texts:
            rows.append(Row(tuple(meetings), " / ".join(sorted(texts))))
    return tuple(rows)


def chosen(rows: tuple[Row, ...], steps: tuple[int, int] | None) -> tuple[Row, ...]:
    """The rows of the rounds in which these steps (first, last) are taken."""
    if steps is None:
        return rows
    first, last = steps
    there = {row.round for row in rows if row.steps[0] <= last and row.steps[1] >= first}
    there &= {row.round for row in rows if _takes(row, first, last)} or there
    return tuple(row for row in rows if row.round in there)


def _takes(row: Row, first: int, last: int) -> bool:
    """Whether a rank takes one of the steps in this row."""
    taken = (c for c in row.cells if c is not None and c.text.startswith("step "))
    return any(first <= cell.step <= last for cell in taken)


def _parts(trace: RankTrace) -> Iterator[_Part]:
    part, round_, step = _Part([]), 0, 0
    before: Line | None = None
    for line in trace.lines:
        if isinstance(line.event, Tallied | Totalled):
            told = _told(line.event, trace.header.world_size)
            part.meeting = Cell(line.time, told, round_, step)
            yield part
            part = _Part([])
        elif line.event is not None:
            part.cells.append(_event(line, before, Cell(line.time, "", round_, step)))
        step += isinstance(line.event, Emitted)
        round_ += isinstance(line.event, Totalled)
        for command in line.commands:
            if isinstance(command, ShareSpare | ShareReason):
                shared = f"exchange {WHAT[type(command)]}: {wording.command(command)}"
                part.meeting = Cell(line.time, shared, round_, step)
                yield part
                part = _Part([])
            elif (said := _does(command)) is not None:
                part.cells.append(Cell(line.time, said, round_, step))
        before = line
    if trace.end is not None:
        outcome = f"ends the epoch: {words.outcome(trace.end.outcome)}"
        part.cells.append(Cell(trace.end.time, outcome, round_, step))
    else:
        time = trace.lines[-1].time if trace.lines else 0.0
        part.cells.append(Cell(time, "the trace breaks off", round_, step))
    yield part


def _told(event: Tallied | Totalled, world_size: int) -> str:
    if isinstance(event, Tallied):
        return f"exchange of reports: {tally_words(world_size, event.tally)}"
    samples = [total.samples for total in event.totals]
    shown = words.listed(map(str, samples[:8])) if len(samples) <= 8 else f"{sum(samples)} in all"
    steps = words.many(len(samples), "step")
    return f"exchange of counts: {steps}, samples on all ranks: {shown}"


def _event(line: Line, before: Line | None, cell: Cell) -> Cell:
    asked = before.commands[-1] if before is not None and before.commands else None
    if isinstance(line.event, Emitted) and isinstance(asked, Emit):
        return replace(cell, text=_step(asked), round=asked.step.round)
    return replace(cell, text=_happened(line))


def _happened(line: Line) -> str:
    event: Event | None = line.event
    why = f" ({line.why})" if line.why else ""
    match event:
        case Arrived(samples):
            return f"reads {wording.names([s.seq for s in samples])}"
        case InputEnded():
            return "reaches the end of its input"
        case Emitted():
            return "emits a step"
        case Failed():
            return f"fails{why}"
        case Closed():
            return "notices that its trainer stopped early"
        case PeerLost():
            return f"loses another rank{why}"
        case _:
            return ""


def _step(command: Emit) -> str:
    step = command.step
    if step.idle:
        return f"step {step.number}: idle"
    return f"step {step.number}: {wording.names([s.seq for s in step.group])}"


def _does(command: Command) -> str | None:
    match command:
        case Filter(sample):
            return f"filters sample {sample.seq}"
        case PostReport() | PostCounts() | Retire() | GiveUp():
            return wording.command(command)
        case _:
            return None
