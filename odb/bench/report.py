"""The benchmarks' results as tables, and the rounds as a plot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from odb.bench.grouping import GroupingBench, GroupingResult
from odb.bench.loader import UNCHUNKED_PART, LoaderBench, LoaderResult
from odb.bench.rounds import RoundBench, RoundResult
from odb.bench.tracing import TraceBench, TraceResult
from odb.planning.report import new_figure, save_figure


def loader_table(results: Sequence[LoaderResult], bench: LoaderBench) -> Table:
    """Samples per second of every arm, and its ratio to the plain loader."""
    spec = bench.lengths
    table = Table(
        title=f"raw iteration of {spec.samples:,} samples, no model",
        caption=(
            f"lengths: lognormal, mean {spec.mean:g}, CV {spec.spread:g}, at most "
            f"{spec.longest:,}; window {bench.window:,}, budget {bench.budget:,}, plain batch "
            f"size {bench.batch_size}, {bench.workers} worker(s) per rank, {cores()} core(s). "
            f"Medians of {bench.repeats} epochs per arm, in turn, after one that is not counted; "
            "from the start of the workers to the last batch. ratio: median of samples/s against "
            "the plain loader's in the same turn (lowest and highest). odb unchunked: each sample "
            f"in a message of its own, 1 in {UNCHUNKED_PART} of the samples"
        ),
    )
    table.add_column("ranks", justify="right")
    table.add_column("loader")
    for heading in ("samples/s", "ratio", "padding", "mean batch"):
        table.add_column(heading, justify="right")
    for result in results:
        for i, arm in enumerate(result.arms):
            spread = f" ({min(arm.ratios):.2f}-{max(arm.ratios):.2f})" if i else ""
            table.add_row(
                "" if i else str(result.ranks),
                arm.arm,
                f"{arm.samples_per_s:,.0f}",
                f"{arm.ratio:.2f}{spread}",
                f"{arm.padding:.1%}",
                f"{arm.mean_batch:.1f}",
                end_section=i + 1 == len(result.arms),
            )
    return table


def round_table(results: Sequence[RoundResult], bench: RoundBench) -> Table:
    """Time of a round by the number of ranks."""
    table = Table(
        title=f"one alignment round of {bench.steps} steps",
        caption=(
            f"{bench.rounds} rounds back to back, both exchanges over Gloo, the slowest rank's "
            f"time; all ranks on this machine's {cores()} core(s)"
        ),
    )
    for heading in ("ranks", "median ms", "95 % under, ms", "median ms per step"):
        table.add_column(heading, justify="right")
    for r in results:
        table.add_row(
            str(r.ranks), f"{r.median_ms:.2f}", f"{r.p95_ms:.2f}", f"{r.median_ms / r.steps:.4f}"
        )
    return table


def grouping_table(results: Sequence[GroupingResult], bench: GroupingBench) -> Table:
    """Time of grouping and aligning one window."""
    table = Table(
        title=f"a window of {bench.lengths.samples:,} samples, budget {bench.budget:,}",
        caption=f"medians of {bench.repeats} runs, one thread",
    )
    table.add_column("work")
    for heading in ("groups in", "groups out", "median ms", "µs per sample"):
        table.add_column(heading, justify="right")
    for r in results:
        table.add_row(
            r.work,
            f"{r.groups_in:,}" if r.groups_in else "-",
            f"{r.groups_out:,}",
            f"{r.median_ms:.2f}",
            f"{r.us_per_sample:.2f}",
        )
    return table


def trace_table(results: Sequence[TraceResult], bench: TraceBench) -> Table:
    """What recording costs, in time and in bytes."""
    table = Table(
        title=f"recording traces of {bench.lengths.samples:,} samples, no model",
        caption=(
            f"{bench.repeats} pairs of epochs with {bench.workers} worker(s) per rank on {cores()} "
            "core(s), after one that is not counted. ratio: median of an epoch's time with "
            "recording against that without in the same pair (lowest and highest). recording: the "
            "same events recorded once more in one thread, as a share of an epoch"
        ),
    )
    headings = ("ranks", "epoch, s", "ratio", "recording", "bytes per sample", "bytes per step")
    for heading in headings:
        table.add_column(heading, justify="right")
    for r in results:
        table.add_row(
            str(r.ranks),
            f"{r.seconds_off:.2f}",
            f"{r.ratio:.3f} ({min(r.ratios):.2f}-{max(r.ratios):.2f})",
            f"{r.recording_share:.2%}",
            f"{r.bytes_per_sample:.1f}",
            f"{r.bytes_per_step:,.0f}",
        )
    return table


def save_round_plot(results: Sequence[RoundResult], path: Path) -> None:
    """How many rounds take at most how long, one curve for each number of ranks.

    Raises MissingDependencyError without matplotlib, ConfigError if the file cannot be written.
    """
    figure = new_figure(width=6.0, height=4.0)
    axes = figure.subplots()
    for result in results:
        times = sorted(result.all_ms)
        shares = [100 * (i + 1) / len(times) for i in range(len(times))]
        axes.step(times, shares, where="post", label=f"{result.ranks} rank(s)")
    axes.set(xlabel="ms", ylabel="% of rounds", xscale="log", title="time of an alignment round")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
