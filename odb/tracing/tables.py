"""The tables that `odb trace` prints, and their rows for other programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from odb.tracing.reading import EpochTraces
from odb.tracing.report import Judged, Report, Verdict
from odb.tracing.timeline import Row

STYLES = {Verdict.CONFORMS: "green", Verdict.INCOMPLETE: "yellow", Verdict.DIVERGES: "bold red"}


def check_table(report: Report) -> Table:
    """A row for each epoch."""
    table = Table(title=f"traces in {report.folder}, replayed through the spec")
    table.add_column("epoch", justify="right")
    for heading in ("ranks", "rounds", "steps", "samples"):
        table.add_column(heading, justify="right")
    table.add_column("outcome")
    table.add_column("transitions", justify="right")
    table.add_column("verdict", no_wrap=True)
    for epoch in report.epochs:
        table.add_row(
            epoch.folder.name.removeprefix("epoch-").lstrip("0") or "0",
            str(epoch.world_size),
            f"{epoch.rounds:,}",
            f"{epoch.steps:,}",
            f"{epoch.samples:,}",
            epoch.outcome,
            f"{epoch.transitions:,}",
            Text(epoch.verdict.value, style=STYLES[epoch.verdict]),
        )
    return table


def problem_lines(report: Report) -> Iterator[Text]:
    """What is wrong, what is missing, and what the promises come to."""
    for epoch in report.epochs:
        where = f"epoch {epoch.epoch}: "
        for text in epoch.problems():
            yield Text(where + text, style="red")
        for text in epoch.missing:
            yield Text(where + text, style="yellow")
        for text in epoch.notes:
            yield Text(where + text, style="dim")
        for row in epoch.promises:
            if row.judged is Judged.UNKNOWN:
                yield Text(f"{where}{row.name} cannot be checked: {row.text}", style="yellow")
    held = _held(report)
    if held:
        yield Text(f"promises that hold in every epoch: {', '.join(held)}")


def _held(report: Report) -> list[str]:
    """The promises that some epoch keeps and no epoch breaks or leaves open."""
    judged: dict[str, set[Judged]] = {}
    for epoch in report.epochs:
        for row in epoch.promises:
            judged.setdefault(row.name, set()).add(row.judged)
    good = {Judged.HOLDS, Judged.NOT_ASKED}
    return [name for name, all_ in judged.items() if Judged.HOLDS in all_ and all_ <= good]


def timeline_table(traces: EpochTraces, rows: Sequence[Row], ranks: Sequence[int]) -> Table:
    """The rows of a timeline, with these ranks as columns. An exchange is in every column."""
    table = Table(
        title=f"{traces.folder.name}: {traces.world_size} rank(s); seconds since its own start",
        caption="between two exchanges (lines) ranks do not influence each other",
    )
    table.add_column("round", justify="right", no_wrap=True)
    for rank in ranks:
        table.add_column(f"rank {rank}")
    for row in rows:
        cells: list[Any] = []
        for rank in ranks:
            cell = row.cells[rank]
            cells.append("" if cell is None else f"{cell.time:.3f} {cell.text}")
        meeting = row.exchange is not None
        style = "cyan" if meeting else None
        table.add_row(str(row.round), *cells, style=style, end_section=meeting)
    return table


def rows_as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain data."""
    return [
        {
            "round": row.round,
            "exchange": row.exchange,
            "ranks": {
                str(rank): {"t": cell.time, "step": cell.step, "text": cell.text}
                for rank, cell in enumerate(row.cells)
                if cell is not None
            },
        }
        for row in rows
    ]
