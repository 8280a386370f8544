"""The time to group and to align a window: the work that the protocol adds to a round."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from odb.bench.data import LengthSpec, draw_lengths
from odb.errors import ConfigError
from spec.alignment import align
from spec.config import Budget
from spec.grouping import group
from spec.samples import Group, Sample


@dataclass(frozen=True)
class GroupingBench:
    """What is measured: a window of `lengths.samples` samples, `repeats` times each."""

    lengths: LengthSpec = field(default_factory=lambda: LengthSpec(samples=10_000))
    budget: int = 16_384
    repeats: int = 7

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"repeats must be 1 or more, not {self.repeats}")


@dataclass(frozen=True)
class GroupingResult:
    """One piece of work: how many groups go in (0: samples do) and come out, the median time of
    the whole window, and that of one sample."""

    work: str
    groups_in: int
    groups_out: int
    median_ms: float
    us_per_sample: float


def bench_grouping(bench: GroupingBench) -> list[GroupingResult]:
    """Group a window, split its groups to twice as many, and carry half of them over."""
    budget = Budget(tokens=bench.budget)
    lengths = draw_lengths(bench.lengths).tolist()
    samples = tuple(Sample(seq, length, length) for seq, length in enumerate(lengths))
    groups = group(budget, samples)
    more = min(2 * len(groups), len(samples))
    fewer = max(1, len(groups) // 2)
    work: list[tuple[str, int, Callable[[], tuple[Group, ...]]]] = [
        ("group the window", 0, lambda: group(budget, samples)),
        ("align: split", len(groups), lambda: align(groups, more).groups),
        ("align: as formed", len(groups), lambda: align(groups, len(groups)).groups),
        ("align: carry", len(groups), lambda: align(groups, fewer).groups),
    ]
    results = []
    for name, groups_in, run in work:
        times = []
        for _ in range(bench.repeats):
            start = time.perf_counter()
            out = run()
            times.append(time.perf_counter() - start)
        typical = median(times)
        results.append(
            GroupingResult(name, groups_in, len(out), 1e3 * typical, 1e6 * typical / len(samples))
        )
    return results
