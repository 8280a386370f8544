"""The verification line: what was checked about ODB, in this run and in its model; no more."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from odb.demo.results import WayResult


class Checked(NamedTuple):
    """A promise that was checked on this run's own records, and what was found."""

    promise: str
    holds: bool
    found: str


@dataclass(frozen=True)
class Verification:
    """`run` was observed once, in this run; `model` is what `model_check` says about the protocol
    itself, if it is installed."""

    run: tuple[Checked, ...]
    model: str | None
    model_holds: bool | None

    @property
    def holds(self) -> bool:
        """Nothing that was checked was found broken."""
        return all(checked.holds for checked in self.run) and self.model_holds is not False

    def lines(self) -> list[str]:
        """The text for people."""
        held = [f"{c.promise} ({c.found})" for c in self.run if c.holds]
        broken = [f"{c.promise} ({c.found})" for c in self.run if not c.holds]
        lines = [f"BROKEN in this run: {', '.join(broken)}"] if broken else []
        if held:
            lines.append(f"verified in this run: {', '.join(held)}")
        lines.append(
            "not checked: the protocol beyond this run (model_check is not installed)"
            if self.model is None
            else f"verified in the protocol: {self.model}"
            if self.model_holds
            else f"BROKEN in the protocol: {self.model}"
        )
        return lines

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "holds": self.holds,
            "run": [checked._asdict() for checked in self.run],
            "model": self.model,
            "lines": self.lines(),
        }


def verify(result: WayResult, budget: int, console: Console) -> Verification:
    """Check ODB's promises on the records of a run, then ask `model_check` about the protocol."""
    model, model_holds = _of_the_protocol(console)
    return Verification(check_run(result, budget), model, model_holds)


def check_run(result: WayResult, budget: int) -> tuple[Checked, ...]:
    """The promises that the records of one run can confirm or refute."""
    steps, accounting = result.steps_per_rank, result.accounting
    epochs = "" if accounting.epochs == 1 else f" in each of {accounting.epochs} epochs"
    over = result.over_budget(budget)
    return (
        Checked(
            "step-alignment",
            result.steps_equal,
            f"{steps[0]:,} steps on each of {len(steps)} ranks"
            if result.steps_equal
            else f"steps of the ranks: {', '.join(map(str, steps))}",
        ),
        Checked(
            "identity-coverage",
            accounting.exactly_once,
            f"{accounting.samples:,} samples, each exactly once{epochs}"
            if accounting.exactly_once
            else f"exactly once? {accounting}",
        ),
        Checked(
            "budget",
            over == 0,
            f"{over or 'no'} batch{'es' if over > 1 else ''} of two or more samples above "
            f"{budget:,} tokens",
        ),
    )


def _of_the_protocol(console: Console) -> tuple[str | None, bool | None]:
    """The verdicts of `model_check` about the protocol, or None if it is not installed."""
    try:
        small_scope = importlib.import_module("model_check.small_scope")
        profiles = importlib.import_module("model_check.profiles")
        verification = importlib.import_module("model_check.verify")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("model_check", "networkx"):
            raise
        return None, None
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("exploring the model", total=None)
        epochs = small_scope.check(
            lambda done, total: progress.update(task, completed=done, total=total)
        )
        explored = verification.verify(profiles.glance())
    holds = explored.verdict.value == "holds"
    text = (
        f"every interleaving of {explored.states:,} states, 2 ranks with up to 2 samples, keeps "
        f"{len(verification.statements())} promises"
        if holds
        else f"exploration: {explored.verdict.value.upper()}"
    )
    return f"{epochs}; {text} ({explored.seconds:.1f} s; more: odb verify)", holds and epochs.holds
