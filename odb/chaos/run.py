"""Performs scenarios with real processes, several at a time, and checks their traces."""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from odb.chaos.draw import Scenario, Space, draw
from odb.chaos.job import TRACES, train
from odb.chaos.judge import Observed, Traced, judge
from odb.errors import ConfigError
from odb.testing import run_ranks
from odb.testing.ranks import RankResults
from odb.tracing import TraceError, Verdict, check

LIMIT_S = 90.0
"""Ranks that have not returned by then hang. Far above the loader's timeout in any scenario."""


@dataclass(frozen=True)
class Campaign:
    """What to run. minutes: begin no more runs after that. keep: where to leave the traces and logs
    of runs that broke a promise."""

    space: Space = field(default_factory=Space)
    runs: tuple[int, ...] = tuple(range(200))
    minutes: float | None = None
    jobs: int = 1
    keep: Path | None = None

    def __post_init__(self) -> None:
        if not self.runs or min(self.runs) < 0:
            raise ConfigError("there must be at least one run, and runs count from 0")
        if self.jobs < 1:
            raise ConfigError(f"jobs must be at least 1, not {self.jobs}")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes must be positive, not {self.minutes}")


@dataclass(frozen=True)
class Result:
    """A run and what is wrong with it, if anything is."""

    scenario: Scenario
    observed: Observed
    problems: tuple[str, ...]
    seconds: float

    @property
    def as_promised(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def run_campaign(campaign: Campaign) -> Iterator[Result]:
    """Perform the runs of a campaign; yields each result when it is there."""
    deadline = None if campaign.minutes is None else time.monotonic() + 60 * campaign.minutes
    left = list(reversed(campaign.runs))
    # Processes that do nothing else start the ranks, as forking is unsafe where threads run.
    with ProcessPoolExecutor(campaign.jobs, mp.get_context("spawn")) as pool:
        running: set[Future[Result]] = set()
        while left or running:
            while left and len(running) < campaign.jobs:
                if deadline is not None and time.monotonic() > deadline:
                    left.clear()
                    break
                running.add(pool.submit(perform, campaign.space, left.pop(), campaign.keep))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def perform(space: Space, run: int, keep: Path | None = None) -> Result:
    """Perform one run, and judge it."""
    scenario = draw(space, run)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="odb-chaos-") as name:
        folder = Path(name)
        observed = observe(scenario, folder)
        problems = judge(scenario, observed)
        if problems and keep is not None:
            shutil.copytree(folder, keep / f"run-{run}", dirs_exist_ok=True)
    return Result(scenario, observed, problems, time.monotonic() - began)


def observe(scenario: Scenario, folder: Path, limit_s: float = LIMIT_S) -> Observed:
    """Perform a scenario. `folder`: for traces and logs."""
    results: RankResults = run_ranks(
        train,
        scenario.world_size,
        scenario,
        folder,
        start_method=scenario.start_method,
        timeout=limit_s,
        check=False,
        faults=scenario.plan,
    )
    assert results.faults is not None
    return Observed(
        ranks=results.values,
        failures={failure.rank: failure.description for failure in results.failures},
        exit_codes=results.exit_codes,
        fired_at=next(iter(results.faults.times.values()), None),
        traced=_check_traces(folder / TRACES),
    )


def _check_traces(folder: Path) -> Traced:
    try:
        report = check(folder)
    except (TraceError, ConfigError) as error:
        return Traced(Verdict.INCOMPLETE, (f"{type(error).__name__}: {error}",))
    problems = [text for epoch in report.epochs for text in epoch.problems()]
    return Traced(report.verdict, tuple(problems))


def default_jobs() -> int:
    """Runs at a time: each has several processes, which mostly wait."""
    return max(1, len(os.sched_getaffinity(0)) // 2) if hasattr(os, "sched_getaffinity") else 1
