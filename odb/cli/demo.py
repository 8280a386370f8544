"""`odb demo`: see for yourself what batching by cost does to a training run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from odb.demo import DemoOptions, DemoReport, run_demo
from odb.demo.table import make_table, notes
from odb.errors import ConfigError, MissingDependencyError, ODBError

DEFAULTS = DemoOptions()


def demo(
    ranks: Annotated[int, typer.Option(help="Processes that train together.")] = DEFAULTS.ranks,
    samples: Annotated[
        int, typer.Option(help="Functions of the standard library to take.")
    ] = DEFAULTS.samples,
    epochs: Annotated[int, typer.Option(help="Epochs of each way.")] = DEFAULTS.epochs,
    budget: Annotated[
        int, typer.Option(help="Most tokens of a rank's batch, padding included.")
    ] = DEFAULTS.budget,
    window: Annotated[
        int, typer.Option(help="Samples that a rank holds to form batches of, or sorts at a time.")
    ] = DEFAULTS.window,
    max_length: Annotated[
        int, typer.Option(help="Cut functions off after this many tokens.")
    ] = DEFAULTS.max_length,
    accumulate: Annotated[
        int | None,
        typer.Option(
            help="Steps of the fixed ways for each update of the weights.",
            show_default="as many as make their updates as large as ODB's",
        ),
    ] = DEFAULTS.accumulate,
    seed: Annotated[
        int, typer.Option(help="Of the choice and order of samples, and the weights.")
    ] = DEFAULTS.seed,
    workers: Annotated[
        int, typer.Option(help="DataLoader workers of each rank, in all three ways.")
    ] = DEFAULTS.workers,
    out: Annotated[Path, typer.Option(help="Folder for demo.png and demo.json.")] = DEFAULTS.out,
    time_limit: Annotated[
        float, typer.Option(help="Seconds of training after which the ranks are ended.")
    ] = DEFAULTS.time_limit,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object in place of the table.")
    ] = False,
) -> None:
    """Train a small model on this Python's own source, with three ways of batching.

    Fixed batch size, fixed with length-sorted windows, and ODB: the same samples, model, optimizer
    and epochs, on real processes. Exits with 1 if ODB broke a promise in the run.
    """
    try:
        options = DemoOptions(
            ranks=ranks,
            samples=samples,
            epochs=epochs,
            budget=budget,
            window=window,
            max_length=max_length,
            accumulate=accumulate,
            seed=seed,
            workers=workers,
            out=out,
            time_limit=time_limit,
        )
        report = run_demo(options, Console(stderr=True))
    except ODBError as error:
        typer.echo(f"odb demo: {error}", err=True)
        usage = isinstance(error, ConfigError | MissingDependencyError)
        raise typer.Exit(2 if usage else 1) from error
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        _print(report, Console(highlight=False))
    raise typer.Exit(0 if report.verification.holds else 1)


def _print(report: DemoReport, console: Console) -> None:
    console.print(make_table(report.results, report.options.budget))
    for note in notes(report):
        console.print(note, style="dim")
    console.print(f"\nsaved {' and '.join(map(str, report.files))}", soft_wrap=True)
    for line in report.verification.lines():
        colour = "green" if report.verification.holds else "red"
        console.print(line, style=f"bold {colour}", soft_wrap=True)
