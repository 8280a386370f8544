"""`odb bench`: measures the loader, the exchange and the grouping on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import track

from odb.bench.data import LengthSpec
from odb.bench.grouping import GroupingBench, bench_grouping
from odb.bench.loader import LoaderBench, bench_loader
from odb.bench.report import (
    cores,
    grouping_table,
    loader_table,
    round_table,
    save_round_plot,
    trace_table,
)
from odb.bench.rounds import RoundBench, bench_rounds
from odb.bench.tracing import TraceBench, bench_tracing
from odb.errors import ConfigError, MissingDependencyError, ODBError
from odb.planning.report import new_figure

app = typer.Typer(help="Measure the loader, the exchange and the grouping.", no_args_is_help=True)

LOADER = LoaderBench()
ROUND = RoundBench()
GROUPING = GroupingBench()
TRACE = TraceBench()

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object in place of the table.")
]


@app.command()
def loader(
    samples: Annotated[int, typer.Option(help="Samples of an epoch.")] = LOADER.lengths.samples,
    window: Annotated[
        int, typer.Option(help="Samples that a rank holds to form batches of.")
    ] = LOADER.window,
    budget: Annotated[
        int, typer.Option(help="Most tokens of a batch, padding included.")
    ] = LOADER.budget,
    batch_size: Annotated[int, typer.Option(help="Of the plain loader.")] = LOADER.batch_size,
    workers: Annotated[int, typer.Option(help="Worker processes per rank.")] = LOADER.workers,
    repeats: Annotated[int, typer.Option(help="Counted epochs of each arm.")] = LOADER.repeats,
    ranks: Annotated[str, typer.Option(help="Numbers of local ranks, such as 1,2.")] = "1,2",
    seed: Annotated[int, typer.Option(help="Of the lengths.")] = LOADER.lengths.seed,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a number of ranks is given up.")
    ] = LOADER.timeout,
    as_json: AsJson = False,
) -> None:
    """Raw iteration of a synthetic long-tail dataset, against a plain DataLoader.

    A third arm sends every sample in a message of its own, to show what chunks buy.
    """
    with _reported("loader"):
        bench = LoaderBench(
            lengths=LengthSpec(samples=samples, seed=seed),
            window=window,
            budget=budget,
            batch_size=batch_size,
            workers=workers,
            repeats=repeats,
            timeout=timeout,
        )
        benches = [replace(bench, ranks=number) for number in _numbers("--ranks", ranks)]
        results = [bench_loader(one) for one in benches]
    _output(
        as_json,
        loader_table(results, bench),
        {"options": asdict(bench), "cores": cores(), "results": [asdict(r) for r in results]},
    )


@app.command("round")
def round_(
    ranks: Annotated[str, typer.Option(help="Numbers of local ranks.")] = "2,4,8",
    steps: Annotated[int, typer.Option(help="Steps of a round (T).")] = ROUND.steps,
    rounds: Annotated[int, typer.Option(help="Rounds to measure.")] = ROUND.rounds,
    plot: Annotated[Path | None, typer.Option(help="Draw the distribution into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """The cost of one alignment round: both exchanges, over Gloo, between local ranks."""
    with _reported("round"):
        bench = RoundBench(steps=steps, rounds=rounds)
        benches = [replace(bench, ranks=number) for number in _numbers("--ranks", ranks)]
        if plot is not None:
            new_figure(1, 1)
        # No refreshing thread: every benchmark forks its ranks here.
        stderr = Console(stderr=True)
        results = [
            bench_rounds(one)
            for one in track(benches, "rounds", console=stderr, auto_refresh=False)
        ]
        if plot is not None:
            save_round_plot(results, plot)
    shown = [{k: v for k, v in asdict(r).items() if k != "all_ms"} for r in results]
    _output(
        as_json,
        round_table(results, bench),
        {"rounds": bench.rounds, "cores": cores(), "results": shown},
    )
    if plot is not None and not as_json:
        typer.echo(f"saved {plot}")


@app.command()
def grouping(
    samples: Annotated[int, typer.Option(help="Samples in the window.")] = GROUPING.lengths.samples,
    budget: Annotated[int, typer.Option(help="Most tokens of a batch.")] = GROUPING.budget,
    repeats: Annotated[int, typer.Option(help="Runs of each.")] = GROUPING.repeats,
    seed: Annotated[int, typer.Option(help="Of the lengths.")] = GROUPING.lengths.seed,
    as_json: AsJson = False,
) -> None:
    """The time of grouping one window of samples and of aligning its groups."""
    with _reported("grouping"):
        bench = GroupingBench(LengthSpec(samples=samples, seed=seed), budget, repeats)
        results = bench_grouping(bench)
    _output(
        as_json,
        grouping_table(results, bench),
        {"options": asdict(bench), "results": [asdict(r) for r in results]},
    )


@app.command()
def trace(
    samples: Annotated[int, typer.Option(help="Samples of an epoch.")] = TRACE.lengths.samples,
    window: Annotated[
        int, typer.Option(help="Samples that a rank holds to form batches of.")
    ] = TRACE.window,
    budget: Annotated[int, typer.Option(help="Most tokens of a batch.")] = TRACE.budget,
    workers: Annotated[int, typer.Option(help="Worker processes per rank.")] = TRACE.workers,
    repeats: Annotated[int, typer.Option(help="Pairs of epochs.")] = TRACE.repeats,
    ranks: Annotated[str, typer.Option(help="Numbers of local ranks, such as 1,2.")] = "1,2",
    as_json: AsJson = False,
) -> None:
    """What recording traces costs: epochs with trace_dir= and without, in pairs, and no model."""
    with _reported("trace"):
        bench = TraceBench(LengthSpec(samples=samples), window, budget, workers, repeats=repeats)
        benches = [replace(bench, ranks=number) for number in _numbers("--ranks", ranks)]
        results = [bench_tracing(one) for one in benches]
    _output(
        as_json,
        trace_table(results, bench),
        {"options": asdict(bench), "cores": cores(), "results": [asdict(r) for r in results]},
    )


def _numbers(option: str, text: str) -> Sequence[int]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise ConfigError(f"{option} {text!r}: {part!r} is not a whole number of 1 or more")
    return [int(part) for part in parts]


def _output(as_json: bool, table: RenderableType, content: dict[str, Any]) -> None:
    if as_json:
        typer.echo(json.dumps(content))
    else:
        Console(highlight=False).print(table)


@contextmanager
def _reported(name: str) -> Iterator[None]:
    """Turns the errors that we raise on purpose into a message and an exit status."""
    try:
        yield
    except ODBError as error:
        typer.echo(f"odb bench {name}: {error}", err=True)
        usage = isinstance(error, ConfigError | MissingDependencyError)
        raise typer.Exit(2 if usage else 1) from error
