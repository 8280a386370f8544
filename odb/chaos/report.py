"""Shows what a campaign found: a table of the kinds of faults, and how to repeat what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from odb.chaos.draw import Kind, Space
from odb.chaos.judge import detection_s, doubled, lost
from odb.chaos.run import Result
from odb.tracing import Verdict


@dataclass(frozen=True)
class Row:
    """The runs of one kind. fired: in how many the fault happened before the run ended. told_s: the
    longest time from a fault until every rank that is told of it had been. conform: how many runs
    the spec reproduces, wholly or as far as a killed rank's trace goes."""

    kind: Kind
    runs: int
    fired: int
    as_promised: int
    told_s: float | None
    lost: int
    doubled: int
    conform: int


def rows_of(results: Sequence[Result]) -> list[Row]:
    """A row for each kind that was drawn."""
    return [
        _row(kind, of_kind)
        for kind in Kind
        if (of_kind := [result for result in results if result.scenario.kind is kind])
    ]


def _row(kind: Kind, results: Sequence[Result]) -> Row:
    told = [s for result in results if (s := detection_s(result.observed)) is not None]
    epochs = [(r, epoch) for r in results for epoch in range(r.scenario.epochs)]
    return Row(
        kind=kind,
        runs=len(results),
        fired=sum(result.observed.fired_at is not None for result in results),
        as_promised=sum(result.as_promised for result in results),
        told_s=max(told, default=None),
        lost=sum(len(lost(r.scenario, r.observed, epoch)) for r, epoch in epochs),
        doubled=sum(len(doubled(r.observed, epoch)) for r, epoch in epochs),
        conform=sum(_conforms(result) for result in results),
    )


def _conforms(result: Result) -> bool:
    traced = result.observed.traced
    return traced.verdict is not Verdict.DIVERGES and not traced.problems


def campaign_table(results: Sequence[Result]) -> Table:
    """The rows, and their sum."""
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("fault", no_wrap=True)
    for name in ("runs", "fired", "kept", "told in", "lost", "doubled", "conform"):
        table.add_column(name, justify="right")
    for row in rows_of(results):
        happens = row.kind not in (Kind.NOTHING, Kind.LEAVE)
        table.add_row(
            row.kind.value,
            str(row.runs),
            str(row.fired) if happens else "-",
            _mark(row.as_promised, row.runs),
            "-" if row.told_s is None else f"{row.told_s:.2f} s",
            _mark_zero(row.lost),
            _mark_zero(row.doubled),
            _mark(row.conform, row.runs),
        )
    return table


def _mark(good: int, of: int) -> str:
    return str(good) if good == of else f"[bold red]{good}[/]"


def _mark_zero(bad: int) -> str:
    return str(bad) if not bad else f"[bold red]{bad}[/]"


def replay_command(space: Space, run: int) -> str:
    """What repeats a run."""
    command = f"odb chaos --seed {space.seed} --run {run}"
    if space.ranks != Space().ranks:
        command += " --ranks " + ",".join(map(str, space.ranks))
    if space.kinds != Space().kinds:
        command += " --faults " + ",".join(kind.name.lower() for kind in space.kinds)
    return command


def failure_lines(space: Space, result: Result) -> list[str]:
    """What was wrong with a run, what it was, and how to repeat it."""
    return [
        f"run {result.scenario.run}, {result.scenario.kind.value}:",
        *(f"  {problem}" for problem in result.problems),
        f"  scenario: {result.scenario.describe()}",
        f"  again: {replay_command(space, result.scenario.run)}",
    ]


def as_json(space: Space, results: Sequence[Result]) -> dict[str, Any]:
    """The campaign as plain data."""
    return {
        "seed": space.seed,
        "runs": len(results),
        "as_promised": sum(result.as_promised for result in results),
        "kinds": [{**vars(row), "kind": row.kind.value} for row in rows_of(results)],
        "failures": [
            {
                "run": result.scenario.run,
                "kind": result.scenario.kind.value,
                "problems": list(result.problems),
                "scenario": result.scenario.describe(),
                "again": replay_command(space, result.scenario.run),
            }
            for result in results
            if not result.as_promised
        ],
    }
