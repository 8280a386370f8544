"""A plan as a table for people, as JSON for programs, and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from odb.errors import ConfigError, MissingDependencyError
from odb.planning.forecast import Forecast, Scenario
from odb.planning.lengths import Lengths


@dataclass(frozen=True)
class Plan:
    """Budget by budget, what odb and what fixed batches come to."""

    source: str
    lengths: Lengths
    scenario: Scenario
    odb: Sequence[Forecast]
    fixed: Sequence[Forecast]

    def as_json(self) -> dict[str, Any]:
        """Everything that the table says, as plain values."""
        costs = self.lengths.costs
        return {
            "source": self.source,
            "samples": len(costs),
            "tokens": sum(costs),
            "mean_length": sum(costs) / len(costs),
            "longest": max(costs),
            "scenario": asdict(self.scenario),
            "odb": [row.as_json() for row in self.odb],
            "fixed": [row.as_json() for row in self.fixed],
        }


def plan_table(plan: Plan) -> Table:
    """One row for each budget with odb, and under it the fixed batch size that fits it."""
    table = Table(title=f"plan for {plan.source}", caption=_caption(plan))
    table.add_column("budget", justify="right")
    table.add_column("batching")
    for heading in (
        "steps",
        "rounds",
        "padding",
        "mean\nbatch",
        "max\nbatch",
        "largest\nbatch\n(tokens)",
        "tokens\n/step\n/rank",
        "effi-\nciency",
        "idle",
        "over-\nsize",
    ):
        table.add_column(heading, justify="right")
    for odb, fixed in zip(plan.odb, plan.fixed, strict=True):
        table.add_row(f"{odb.budget:,}", *_cells(odb))
        table.add_row("", *_cells(fixed), style="dim", end_section=True)
    return table


def _cells(row: Forecast) -> list[str]:
    return [
        row.batching,
        f"{row.steps:,}",
        f"{row.rounds:,}" if row.rounds else "-",
        f"{row.padding:.1%}",
        f"{row.mean_batch:.1f}",
        f"{row.max_batch:,}",
        f"{row.largest_batch_tokens:,}",
        f"{row.tokens_per_step:,.0f}",
        f"{row.efficiency:.1%}",
        f"{row.idle:.1%}",
        f"{row.oversize:,}" if row.oversize else "-",
    ]


def _caption(plan: Plan) -> str:
    """What the rows have in common, and how to read them."""
    scenario, costs, first = plan.scenario, plan.lengths.costs, plan.odb[0]
    order = f"shuffled with seed {scenario.seed}" if scenario.shuffle else "in dataset order"
    lines = [
        f"{len(costs):,} samples, mean {sum(costs) / len(costs):,.0f} and at most {max(costs):,} "
        f"tokens, {order}; {scenario.world_size} rank(s), window {scenario.window:,}",
        "batch: samples of a rank and step. largest batch: what memory has to hold, padding "
        "included. efficiency: real tokens / (world size x largest batch of each step)",
    ]
    if first.filtered:
        lines.append(f"{first.filtered:,} samples have no tokens or no loss: filtered")
    if any(row.undelivered for row in plan.odb):
        left = ", ".join(f"{row.undelivered:,} ({row.budget:,})" for row in plan.odb)
        lines.append(f"undelivered in quota mode, by budget: {left}; fixed rows read everything")
    return "\n".join(lines)


def save_plot(plan: Plan, path: Path) -> None:
    """Padding, efficiency and steps against the budget, in a file of the kind its suffix names.

    Raises MissingDependencyError without matplotlib, ConfigError if the file cannot be written.
    """
    figure = new_figure(width=9.0, height=4.0)
    shares, counts = figure.subplots(1, 2)
    order = sorted(range(len(plan.odb)), key=lambda i: plan.odb[i].budget)
    budgets = [plan.odb[i].budget for i in order]
    for rows, name, line in ((plan.odb, "odb", "-"), (plan.fixed, "fixed", "--")):
        drawn = [rows[i] for i in order]
        shares.plot(
            budgets, [100 * r.padding for r in drawn], f"C1o{line}", label=f"padding, {name}"
        )
        efficiencies = [100 * r.efficiency for r in drawn]
        shares.plot(budgets, efficiencies, f"C0o{line}", label=f"efficiency, {name}")
        counts.plot(budgets, [r.steps for r in drawn], f"C2o{line}", label=name)
    shares.set(xlabel="token budget", ylabel="%", ylim=(0, 100), title="padding and efficiency")
    counts.set(xlabel="token budget", ylabel="steps", yscale="log", title="steps of an epoch")
    for axes in (shares, counts):
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets], rotation=30)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    save_figure(figure, path)


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure (inches) that needs no display. Raises MissingDependencyError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "a plot needs matplotlib: pip install 'verified-odb[plot]'"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure. Raises ConfigError for a folder that is not there or an unknown suffix."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot to {path}: {error}") from error
