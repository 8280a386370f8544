"""`odb chaos`: random real runs with faults, each checked against what is promised."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from odb.errors import ConfigError, MissingDependencyError, ODBError

if TYPE_CHECKING:
    from odb.chaos.draw import Kind
    from odb.chaos.run import Campaign, Result


def chaos(
    runs: Annotated[int, typer.Option(help="How many runs.")] = 200,
    seed: Annotated[int, typer.Option(help="The same gives the same runs.")] = 1,
    run: Annotated[
        int | None, typer.Option("--run", help="Only this run, with all that its ranks saw.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Begin no run after that.")] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks to draw from.")] = "2,3,4",
    faults: Annotated[
        str | None,
        typer.Option(help="Only these kinds, such as kill_rank,drop_connection (? lists them)."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time. Default: half as many as there are cores.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write JSON to this file (- for stdout).")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Leave traces and logs of failing runs in this folder.")
    ] = None,
) -> None:
    """Run random jobs of real processes, make faults happen to them, and check what is promised.

    Each run draws ranks, shards, settings, start methods and a fault. Whatever happens, no rank may
    hang; after an error every rank must have the right one, naming the right rank, at the right
    step; no sample is delivered twice, none is lost without an error; and the trace of every rank
    must be what the spec does. Exits with 1 if one run was not as promised.
    """
    try:
        _require_extra()
        from odb.chaos.draw import Space
        from odb.chaos.run import Campaign, default_jobs

        space = Space(seed, _numbers(ranks), _kinds(faults))
        numbers = tuple(range(runs)) if run is None else (run,)
        campaign = Campaign(space, numbers, minutes, default_jobs() if jobs is None else jobs, keep)
        _perform(campaign, _Output(json_file, run is not None))
    except ODBError as error:
        typer.echo(f"odb chaos: {error}", err=True)
        raise typer.Exit(2) from error


@dataclass(frozen=True)
class _Output:
    json_file: Path | None
    in_detail: bool


def _require_extra() -> None:
    try:
        import networkx  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f'odb chaos needs {error.name}: pip install "verified-odb[verify]"'
        ) from error


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--ranks are whole numbers, such as 2,3,4, not {text!r}")
    return tuple(map(int, parts))


def _kinds(text: str | None) -> tuple[Kind, ...]:
    from odb.chaos.draw import Kind

    if text is None:
        return tuple(Kind)
    names = [part.strip().upper() for part in text.split(",")]
    if not set(names) <= set(Kind.__members__):
        choices = ", ".join(name.lower() for name in Kind.__members__)
        raise ConfigError(f"--faults must be of {choices}, not {text!r}")
    return tuple(Kind[name] for name in names)


def _perform(campaign: Campaign, output: _Output) -> None:
    from odb.chaos.report import as_json, campaign_table, failure_lines

    console = Console(stderr=output.json_file == Path("-"), highlight=False)
    results = _run(campaign)
    for result in results:
        if output.in_detail:
            _print_detail(console, result)
        if not result.as_promised:
            for line in failure_lines(campaign.space, result):
                console.print(line, soft_wrap=True, markup=False)
    console.print(campaign_table(results))
    report = as_json(campaign.space, results)
    if output.json_file == Path("-"):
        typer.echo(json.dumps(report))
    elif output.json_file is not None:
        output.json_file.write_text(json.dumps(report, indent=2) + "\n")
    raise typer.Exit(0 if all(result.as_promised for result in results) else 1)


def _run(campaign: Campaign) -> list[Result]:
    from odb.chaos.run import run_campaign

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} runs, {task.fields[failed]} not as promised"),
        TimeElapsedColumn(),
    )
    # What killed ranks leave behind is no news here; Python's tracker would tell of it.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    results: list[Result] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=len(campaign.runs), failed=0)
        for result in run_campaign(campaign):
            results.append(result)
            progress.update(
                task,
                advance=1,
                description=result.scenario.kind.value,
                failed=sum(not result.as_promised for result in results),
            )
    return sorted(results, key=lambda result: result.scenario.run)


def _print_detail(console: Console, result: Result) -> None:
    from odb.chaos.judge import detection_s

    observed = result.observed
    console.print(result.scenario.describe(), soft_wrap=True, markup=False)
    for rank, seen in enumerate(observed.ranks):
        code = observed.exit_codes[rank]
        if seen is None:
            said = f"nothing; exit code {code}"
        else:
            steps = ", ".join(str(len(epoch.steps)) for epoch in seen.epochs)
            ending = "no error" if seen.error is None else f"{seen.error.name}: {seen.error.text}"
            said = f"steps of its epochs: {steps or 'none'}; exit code {code}; {ending}"
        console.print(f"  rank {rank}: {said}", soft_wrap=True, markup=False)
    told = detection_s(observed)
    if told is not None:
        console.print(f"  every rank that was told of it was so after {told:.2f} s")
    console.print(f"  traces: {observed.traced.verdict.value}")
