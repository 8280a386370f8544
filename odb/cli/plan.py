"""`odb plan`: choose a token budget from the lengths alone, before paying for GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from odb.errors import ConfigError, MissingDependencyError, ODBError
from odb.planning import Lengths, Origin, Scenario, forecast, read_lengths
from odb.planning.forecast import forecast_fixed
from odb.planning.lengths import DEFAULT_FIELD
from odb.planning.report import Plan, new_figure, plan_table, save_plot

DEFAULTS = Scenario()
NARROWEST = 110
"""Columns of the terminal that the table takes at least, where the output is not a terminal."""


def plan(
    lengths: Annotated[
        str,
        typer.Argument(
            help="File of lengths (.txt, .json, .jsonl, .csv, .parquet), or module:dataset."
        ),
    ],
    budget: Annotated[
        list[str], typer.Option(help="Tokens of a batch: several times, or 8192,16384,...")
    ],
    world_size: Annotated[
        int, typer.Option(help="Ranks that train together.")
    ] = DEFAULTS.world_size,
    window: Annotated[
        int, typer.Option(help="Samples that a rank holds to form batches of.")
    ] = DEFAULTS.window,
    packed: Annotated[
        bool, typer.Option("--packed", help="Rows are packed: a batch costs their sum.")
    ] = DEFAULTS.packed,
    max_samples: Annotated[
        int | None, typer.Option(help="Most samples of a batch.")
    ] = DEFAULTS.max_samples,
    pad_to_multiple_of: Annotated[
        int, typer.Option(help="Padded lengths are rounded up to this.")
    ] = DEFAULTS.pad_to_multiple_of,
    join: Annotated[
        bool, typer.Option(help="Deliver every sample, or (--no-join) stop all ranks together.")
    ] = DEFAULTS.join,
    quota: Annotated[
        int | None, typer.Option(help="With --no-join: samples that end the epoch.")
    ] = DEFAULTS.quota,
    shuffle: Annotated[bool, typer.Option(help="Read as shuffle=True does.")] = DEFAULTS.shuffle,
    seed: Annotated[int, typer.Option(help="Of the order of samples and steps.")] = DEFAULTS.seed,
    field: Annotated[
        str, typer.Option("--field", "--column", help="JSON field or column of the length.")
    ] = DEFAULT_FIELD,
    cost_fn: Annotated[
        str | None, typer.Option(help="For a dataset: module:function that counts tokens.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw padding, efficiency and steps into this file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object in place of the table.")
    ] = False,
) -> None:
    """Predict padding, steps, batch sizes and alignment efficiency for some token budgets.

    The epoch is run on the lengths by the loader's own protocol, so that a prediction is what an
    ODBDataLoader with these settings delivers. Each budget is compared with the largest fixed
    batch size that fits it.
    """
    console = Console(stderr=True)
    try:
        scenario = Scenario(
            world_size=world_size,
            window=window,
            packed=packed,
            max_samples=max_samples,
            pad_to_multiple_of=pad_to_multiple_of,
            join=join,
            quota=quota,
            shuffle=shuffle,
            seed=seed,
        )
        budgets = _budgets(budget)
        for tokens in budgets:
            scenario.config(tokens)  # refuses bad settings before anything takes long
        if plot is not None:
            new_figure(1, 1)
        found = read_lengths(Origin(lengths, field, cost_fn), console)
        result = _make_plan(lengths, found, scenario, budgets)
        if plot is not None:
            save_plot(result, plot)
    except ODBError as error:
        typer.echo(f"odb plan: {error}", err=True)
        usage = isinstance(error, ConfigError | MissingDependencyError)
        raise typer.Exit(2 if usage else 1) from error
    if as_json:
        typer.echo(json.dumps(result.as_json()))
        return
    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = max(out.width, NARROWEST)
    out.print(plan_table(result))
    if plot is not None:
        out.print(f"saved {plot}", soft_wrap=True)


def _budgets(texts: Sequence[str]) -> list[int]:
    parts = [part.strip() for text in texts for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise ConfigError(f"--budget {part!r} is not a whole number of 1 or more tokens")
    return list(dict.fromkeys(map(int, parts)))


def _make_plan(source: str, lengths: Lengths, scenario: Scenario, budgets: Sequence[int]) -> Plan:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        total = len(budgets) * len(lengths.costs)
        task = progress.add_task("planning", total=total)
        rows = [
            forecast(lengths, scenario, budget, lambda read: progress.advance(task, read))
            for budget in budgets
        ]
        fixed = [forecast_fixed(lengths, scenario, budget) for budget in budgets]
    return Plan(source, lengths, scenario, rows, fixed)
