"""`odb trace`: check that recorded runs obey the spec, and show what happened in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from odb.errors import ConfigError, MissingDependencyError, ODBError
from odb.tracing import Report, Verdict, check

if TYPE_CHECKING:
    from odb.tracing.reading import EpochTraces

app = typer.Typer(
    help="Check that recorded runs obey the spec, and show what happened in them.",
    no_args_is_help=True,
)

Folder = Annotated[
    Path, typer.Argument(help="What was passed as trace_dir=, or the folder of one epoch.")
]
EpochNumber = Annotated[int | None, typer.Option("--epoch", help="Only this epoch.")]


@app.command("check")
def check_command(
    folder: Folder,
    epoch: EpochNumber = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write JSON to this file (- for stdout).")
    ] = None,
) -> None:
    """Replay all ranks through the spec, and judge every promise over the merged run.

    Exits with 0 only if every trace is there, is complete, and has every command and every state
    of the spec, and no promise is broken; with 1 if not; with 2 for files that are no traces.
    """
    from odb.tracing.tables import check_table, problem_lines

    with _reported("check"):
        report = _check(folder, epoch)
        console = Console(stderr=json_file == Path("-"), highlight=False)
        console.print(check_table(report))
        for line in problem_lines(report):
            console.print(line, soft_wrap=True)
        _write_json(json_file, report.as_json())
    raise typer.Exit(0 if report.verdict is Verdict.CONFORMS else 1)


def _check(folder: Path, epoch: int | None) -> Report:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading")

        def tell(done: int, of: int, what: str) -> None:
            progress.update(task, completed=done, total=of, description=what)

        return check(folder, epoch, tell)


@app.command()
def show(
    folder: Folder,
    epoch: EpochNumber = None,
    steps: Annotated[
        str | None, typer.Option(help="Only the rounds that take these steps: 7, or 3-9.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Most rows, or actions, to show.")] = 60,
    ranks: Annotated[
        str | None, typer.Option(help="Columns of the table, such as 0,3 (default: the first 4).")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page that steps through the run to this file.")
    ] = None,
    mermaid: Annotated[
        bool, typer.Option("--mermaid", help="Print a Mermaid sequence diagram.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows as one JSON object.")
    ] = False,
) -> None:
    """Show a recorded epoch (the first, or --epoch) as a table, a column for each rank.

    Between two exchanges ranks do not influence each other; an exchange completes for all. With
    --html and --mermaid the run is performed once more by the closed system that `odb verify`
    explores, and drawn like a counterexample.
    """
    from odb.tracing.reading import epoch_folders, read_epoch

    with _reported("show"):
        traces = read_epoch(epoch_folders(folder, epoch)[0])
        wanted = _range(steps)
        if html is not None or mermaid:
            _draw(traces, wanted, limit, html)
            return
        _table(traces, wanted, limit, None if ranks is None else _numbers(ranks), as_json)


def _table(
    traces: EpochTraces,
    steps: tuple[int, int] | None,
    limit: int,
    ranks: Sequence[int] | None,
    as_json: bool,
) -> None:
    from odb.tracing.tables import rows_as_json, timeline_table
    from odb.tracing.timeline import chosen, timeline

    rows = chosen(timeline(traces), steps)
    columns = list(range(traces.world_size))[:4] if ranks is None else ranks
    for rank in columns:
        if rank >= traces.world_size:
            raise ConfigError(f"--ranks: a run of {traces.world_size} ranks has no rank {rank}")
    if as_json:
        typer.echo(json.dumps({"epoch": traces.epoch, "rows": rows_as_json(rows[:limit])}))
        return
    console = Console(highlight=False)
    console.print(timeline_table(traces, rows[:limit], columns))
    if len(rows) > limit:
        console.print(f"... and {len(rows) - limit} more rows: --limit, or --steps first-last")


def _draw(
    traces: EpochTraces, steps: tuple[int, int] | None, limit: int, html: Path | None
) -> None:
    try:
        from model_check.render.html import as_html
        from model_check.render.mermaid import as_mermaid
    except ImportError as error:
        raise MissingDependencyError(
            f'drawing needs {error.name}: pip install "verified-odb[verify]"'
        ) from error
    from odb.tracing.performing import perform

    trace = perform(traces, steps, limit)
    if html is None:
        typer.echo(as_mermaid(trace), nl=False)
        return
    try:
        html.write_text(as_html(trace), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: {error}") from error
    typer.echo(f"wrote {html}")


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise ConfigError(f"--steps is a step or a range, such as 7 or 3-9, not {text!r}")
    return int(first), int(last or first)


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--ranks are whole numbers, such as 0,3, not {text!r}")
    return list(map(int, parts))


def _write_json(path: Path | None, report: dict[str, Any]) -> None:
    if path == Path("-"):
        typer.echo(json.dumps(report))
    elif path is not None:
        try:
            path.write_text(json.dumps(report, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"--json: {error}") from error


@contextmanager
def _reported(name: str) -> Iterator[None]:
    """Turns the errors that we raise on purpose into a message and an exit status."""
    try:
        yield
    except ODBError as error:
        typer.echo(f"odb trace {name}: {error}", err=True)
        raise typer.Exit(2) from error
