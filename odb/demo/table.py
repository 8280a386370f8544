"""The table of the three ways, and the notes that one needs to read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich import box
from rich.table import Table

from odb.demo.records import Way
from odb.demo.results import WayResult
from odb.demo.run import DemoReport


def make_table(results: Mapping[Way, WayResult], budget: int) -> Table:
    """One column for each way; speeds also as multiples of the fixed batch size's."""
    fixed = results[Way.FIXED]
    time = results[Way.ODB].seconds

    def row(name: str, cell: Callable[[WayResult], str]) -> None:
        table.add_row(name, *(cell(results[way]) for way in Way))

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for way in Way:
        table.add_column(way.title, justify="right", style="bold" if way is Way.ODB else None)
    row("seconds", lambda r: f"{r.seconds:.1f}")
    row("samples/s", lambda r: _ratio(r, fixed, lambda x: x.samples_per_second))
    row("real tokens/s", lambda r: _ratio(r, fixed, lambda x: x.tokens_per_second))
    row("padding", lambda r: f"{r.padding:.1%}")
    row("budget filled", lambda r: f"{r.budget_filled(budget):.0%}")
    row("steps", lambda r: f"{max(r.steps_per_rank):,}")
    row("mean tokens per step", lambda r: f"{r.tokens_per_step:,.0f}")
    row("updates of the weights", lambda r: f"{r.updates:,}")
    row("final validation loss", lambda r: f"{r.loss:.3f}")
    row(f"validation loss at {time:.0f} s", lambda r: f"{r.loss_at(time):.3f}")
    row("samples seen exactly once", lambda r: str(r.accounting))
    row("steps equal on all ranks", lambda r: "yes" if r.steps_equal else "NO")
    return table


def notes(report: DemoReport) -> list[str]:
    """What the table cannot say: how the ways were made comparable."""
    options, results = report.options, report.results
    measuring = max(record.measuring for record in results[Way.SORTED].ranks)
    return [
        f"fixed size: {report.size} samples per rank, the most that fits {options.budget:,} tokens "
        f"when all of them are as long as the longest ({report.corpus.longest:,}).",
        f"sorted: also {report.size} samples, of like length within {options.window:,} samples. It "
        "has to know all lengths beforehand, so it tokenizes every sample once more (took "
        f"{measuring:.1f} s, counted).",
        f"Both fixed ways update the weights {_how_often(report)}. Model, optimizer and learning "
        "rate (which goes by samples) are the same in all ways.",
        "Batches that fill little of the budget cost a CPU nothing, but leave an accelerator idle "
        "(not measured here).",
        "Seconds are of training without validation; tokens per step are of all ranks together. "
        f"Loss at {results[Way.ODB].seconds:.0f} s: when ODB was done, between two checkpoints.",
    ]


def _how_often(report: DemoReport) -> str:
    steps = report.results[Way.FIXED].ranks[0].accumulate
    often = "after every step" if steps == 1 else f"after every {steps} steps, gradients added up"
    if report.options.accumulate is not None:
        return f"{often} (as --accumulate says)"
    return (
        f"{often}, so that an update sees about as many samples as ODB's (with --accumulate 1 they "
        "update more often, and in so short a run reach a lower loss than ODB)"
    )


def _ratio(result: WayResult, base: WayResult, of: Callable[[WayResult], float]) -> str:
    text = f"{of(result):,.0f}"
    return text if result is base else f"{text} ({of(result) / of(base):.2f}x)"
