"""Runs a simulation for `odb verify --simulate`, with a progress display."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from model_check.random_worlds import SimulationOptions
from model_check.render.trace import Trace
from model_check.simulate import SimulatedFailure, SimulationResult, simulate
from odb.errors import ConfigError

if TYPE_CHECKING:
    from odb.cli.verify import Simulated


def options_of(wish: Simulated) -> SimulationOptions:
    """The bounds that were asked for. Raises ConfigError for one that a simulation draws itself."""
    known = {field.name for field in fields(SimulationOptions)}
    given = {name: value for name, value in wish.bounds.items() if value is not None}
    for name in given:
        if name not in known:
            raise ConfigError(f"--{name} is not for --simulate, which draws it at random")
    if wish.minutes <= 0:
        raise ConfigError(f"minutes must be above 0, not {wish.minutes}")
    options = SimulationOptions(seed=wish.seed, seconds=60 * wish.minutes, **given)
    if wish.mode != "all":
        options = replace(options, mode=wish.mode)
    return replace(options, faults=0) if wish.faults is False else options


def run_simulation(wish: Simulated, console: Console) -> SimulationResult:
    """Simulate within the bounds that were asked for."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=None)

        def on_run(runs: int, actions: int) -> None:
            progress.update(task, description=f"{runs:,} runs, {actions:,} actions")

        return simulate(options_of(wish), on_run)


def trace_of_failure(failure: SimulatedFailure) -> Trace:
    """The shrunk run, to be shown like any counterexample."""
    run = failure.violation
    title = f"run {failure.run} of seed {failure.seed}"
    return Trace(title, run.promise, run.text, failure.world, run.states, run.actions, run.repeats)


def as_json(result: SimulationResult) -> dict[str, Any]:
    """The result for other programs."""
    failure = result.failure
    return {
        "verdict": result.verdict.value,
        "ranks": result.options.ranks,
        "seed": result.options.seed,
        "runs": result.runs,
        "actions": result.actions,
        "longest_run": result.longest_run,
        "seconds": result.seconds,
        "goals": dict(result.goals),
        "failure": None
        if failure is None
        else {
            "run": failure.run,
            "promise": failure.promise,
            "text": failure.text,
            "actions": list(map(str, failure.violation.actions)),
        },
    }
