"""Faults of a plan happen where they should, once, and one that does not happen is reported."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

import odb
from odb.hooks import NO_HOOKS, hooks_of
from odb.testing import (
    BlockInSample,
    DelayExchange,
    DropConnection,
    Fault,
    FaultPlan,
    KillRank,
    KillWorker,
    RaiseInBatch,
    RaiseInSample,
    RankError,
    RankResults,
    SlowRank,
    StopRank,
    UnfiredFaultsError,
    run_ranks,
)
from odb.watch import watcher

SIZE = 60


class Plain:
    """Samples 0 to 59 on every rank."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [index + 1] * (5 + index % 40)}


@dataclass
class Seen:
    """What a rank's trainer saw."""

    steps: int = 0
    samples: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    cause: BaseException | None = None
    seconds: float = 0.0
    children: int = 0


def train(
    rank: int, world_size: int, epochs: int = 1, begin_after: float = 0.0, **options: Any
) -> Seen:
    """Iterate and write down what happens; nothing here knows of faults."""
    settings: dict[str, Any] = {"token_budget": 128, "window": 8, "timeout": 30.0, **options}
    loader = odb.ODBDataLoader(Plain(), sampler=range(SIZE), **settings)
    seen = Seen()
    began = time.monotonic()
    try:
        for _ in range(epochs):
            steps = loader.steps()
            time.sleep(begin_after)
            for _, info in steps:
                seen.steps += 1
                seen.samples.extend(info.sample_ids)
    except odb.ODBError as error:
        seen.error, seen.cause = error, error.__cause__
    seen.seconds = time.monotonic() - began
    loader.close()
    seen.children = len(psutil.Process().children())
    return seen


def train_with(rank: int, world_size: int, options: dict[str, Any]) -> Seen:
    return train(rank, world_size, **options)


def run(plan: FaultPlan, world_size: int = 2, method: Any = "fork", **options: Any) -> RankResults:
    results: RankResults = run_ranks(
        train_with, world_size, options, start_method=method, timeout=60, check=False, faults=plan
    )
    return results


# ---------------------------------------------------------------- what happens


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_raises(workers: int) -> None:
    fault = RaiseInSample(rank=1, sample=20)
    first, second = run(FaultPlan(fault), num_workers=workers).values
    assert isinstance(first.error, odb.PeerFailedError)
    assert (first.error.rank, first.error.step) == (1, second.error.step)
    assert first.steps == second.steps == first.error.step
    assert isinstance(second.error, odb.PipelineError)
    assert isinstance(second.cause, odb.SampleError)
    assert second.cause.sample_id == 20
    assert "InjectedError" in second.cause.summary


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_faults_reach_workers_under_every_start_method(method: str) -> None:
    plan = FaultPlan(KillWorker(rank=0, worker=1, sample=21))
    results = run(plan, method=method, num_workers=2, chunk=4, multiprocessing_context=method)
    first, second = results.values
    assert isinstance(first.error, odb.PipelineError)
    assert isinstance(first.cause, odb.WorkerLostError)
    assert (first.cause.worker, first.cause.signal) == (1, "SIGKILL")
    assert isinstance(second.error, odb.PeerFailedError)
    assert first.steps == second.steps
    assert results.faults is not None
    assert results.faults.fired == plan.faults


def test_a_batch_that_raises() -> None:
    fault = RaiseInBatch(rank=0, step=4)
    first, second = run(FaultPlan(fault)).values
    assert first.steps == second.steps == first.error.step >= 4
    assert isinstance(first.cause, odb.BatchError)
    assert "InjectedError: RaiseInBatch" in str(first.cause)
    assert isinstance(second.error, odb.PeerFailedError)


@pytest.mark.parametrize("where", [{"step": 5}, {"round": 2}], ids=["step", "round"])
def test_a_rank_that_is_killed(where: dict[str, int]) -> None:
    results = run(FaultPlan(KillRank(rank=2, **where)), world_size=3)
    assert [failure.rank for failure in results.failures] == [2]
    assert results.exit_codes == (0, 0, -9)
    for seen in results.values[:2]:
        assert isinstance(seen.error, odb.PeerLostError)
        assert seen.error.rank == 2


def connect_slowly(rank: int, world_size: int) -> Seen:
    """Rank 2's worker is forked while the peer watch connects."""
    call = watcher.call_parent

    def slow_call(*args: Any) -> Any:
        sock = call(*args)
        time.sleep(1.0)
        return sock

    watcher.call_parent = slow_call
    return train(rank, world_size, num_workers=1, begin_after=2.0)


def test_a_worker_that_outlives_its_rank_does_not_hide_its_death() -> None:
    """It is forked with copies of all connections, and blocks: it never looks for its rank."""
    plan = FaultPlan(BlockInSample(rank=2, sample=0), KillRank(rank=2, step=0))
    results: RankResults = run_ranks(
        connect_slowly, 3, start_method="fork", timeout=60, check=False, faults=plan
    )
    for seen in results.values[:2]:
        assert isinstance(seen.error, odb.PeerLostError), seen
        assert seen.error.rank == 2
    # Nor does the worker keep the harness waiting, which has pipes to its rank.
    assert not any(failure.hangs for failure in results.failures)


def leave_a_process_behind(rank: int, world_size: int) -> None:
    subprocess.Popen(["sleep", "1234.5"])
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_harness_ends_what_a_dead_rank_leaves_behind() -> None:
    results = run_ranks(leave_a_process_behind, 1, start_method="fork", timeout=30, check=False)
    assert not results.failures[0].hangs
    time.sleep(0.2)
    assert not running("1234.5")


def test_a_rank_that_is_stopped_goes_on() -> None:
    plan = FaultPlan(StopRank(rank=1, step=3, seconds=2.0))
    results = run(plan)
    assert results.exit_codes == (0, 0)
    for seen in results.values:
        assert seen.samples.count(0) == 1
        assert len(seen.samples) == SIZE
        assert seen.seconds > 1.9
        assert seen.children == 0, "whoever continued it is gone"


def test_who_continues_a_rank_does_not_outlive_it() -> None:
    """The harness kills a rank that is stopped for longer than its time limit."""
    plan = FaultPlan(StopRank(rank=0, step=1, seconds=50.0))
    with pytest.raises(RankError, match="had not returned"):
        run_ranks(train, 1, start_method="fork", timeout=3, faults=plan)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and running("50.0"):
        time.sleep(0.1)
    assert not running("50.0")


def running(last_argument: str) -> list[int]:
    """Processes with this last argument (zombies have none)."""
    found = (process.info for process in psutil.process_iter(["pid", "cmdline"]))
    return [p["pid"] for p in found if p["cmdline"] and p["cmdline"][-1] == last_argument]


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        (SlowRank(rank=0, seconds_per_step=0.05), 0.5),
        (SlowRank(rank=0, seconds_per_sample=0.02), 1.2),
        (DelayExchange(rank=0, round=2, seconds=1.5), 1.5),
        (BlockInSample(rank=0, sample=30, seconds=1.5), 1.5),
    ],
)
def test_a_rank_that_is_slow_delays_all_and_loses_nothing(fault: Fault, seconds: float) -> None:
    for seen in run(FaultPlan(fault)).values:
        assert seen.error is None
        assert sorted(seen.samples) == list(range(SIZE))
        assert seen.seconds >= 0.9 * seconds


def test_a_sample_that_blocks_ends_in_a_timeout() -> None:
    for seen in run(FaultPlan(BlockInSample(rank=1, sample=30)), timeout=3.0).values:
        assert isinstance(seen.error, odb.ExchangeTimeoutError)
        assert seen.error.missing == (1,)


@pytest.mark.parametrize("victim", [0, 2])
def test_connections_that_are_dropped(victim: int) -> None:
    results = run(FaultPlan(DropConnection(rank=victim, round=2)), world_size=3)
    assert not results.failures
    for rank, seen in enumerate(results.values):
        assert isinstance(seen.error, odb.PeerLostError)
        assert rank == victim or seen.error.rank == victim
        assert seen.seconds < 15


def test_a_fault_waits_for_its_epoch_and_happens_once() -> None:
    plan = FaultPlan(RaiseInBatch(rank=0, step=2, epoch=1), DelayExchange(0, round=0, seconds=0.1))
    results = run(plan, world_size=1, epochs=2)
    steps = run(FaultPlan(), world_size=1).values[0].steps
    assert results.values[0].steps == steps + 2


# ---------------------------------------------------------------- plans in this process


def steps_of(loader: odb.ODBDataLoader) -> int:
    return sum(1 for _ in loader.steps())


def a_loader(**options: Any) -> odb.ODBDataLoader:
    return odb.ODBDataLoader(Plain(), token_budget=128, window=8, **options)


def test_a_plan_is_active_inside_its_block_only() -> None:
    loader = a_loader()
    steps = steps_of(loader)
    plan = FaultPlan(RaiseInSample(rank=0, sample=20))
    assert hooks_of(0) is NO_HOOKS
    with plan as active:
        with pytest.raises(odb.PipelineError, match="sample 20"):
            steps_of(loader)
        assert active.fired == plan.faults
        assert steps_of(loader) == steps, "it happens once"
    assert active.unfired == ()
    assert not Path(active.ledger.folder).exists()
    assert hooks_of(0) is NO_HOOKS
    assert steps_of(loader) == steps


def test_workers_that_persist_hear_of_a_plan() -> None:
    loader = a_loader(num_workers=1, persistent_workers=True)
    steps = steps_of(loader)
    sour = pytest.raises(odb.PipelineError, match="sample 20")
    with FaultPlan(RaiseInSample(rank=0, sample=20)), sour:
        steps_of(loader)
    assert steps_of(loader) == steps
    loader.close()


def test_a_fault_that_never_happened_is_an_error() -> None:
    """Promise: no test passes without having tested anything."""
    nowhere = FaultPlan(RaiseInSample(rank=0, sample=1000))
    with pytest.raises(UnfiredFaultsError, match="sample=1000") as caught, nowhere:
        steps_of(a_loader())
    assert caught.value.faults == (RaiseInSample(rank=0, sample=1000),)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), UnfiredFaultsError)
    with pytest.raises(odb.ConfigError), nowhere:  # the test's own error is what matters
        a_loader(timeout=0)
    with FaultPlan(KillWorker(rank=0, worker=0), must_fire=False) as active:
        steps_of(a_loader())  # has no workers
    assert active.unfired == (KillWorker(rank=0, worker=0),)
    with pytest.raises(UnfiredFaultsError), FaultPlan(KillRank(rank=3, step=0)):
        pass  # no epoch at all
    with FaultPlan(KillRank(rank=3, step=0)) as active:
        steps_of(a_loader())  # this is rank 0, and what happens to others is not its business
    assert active.unfired == ()


def test_the_harness_reports_faults_that_never_happened() -> None:
    plan = FaultPlan(RaiseInBatch(rank=1, step=1000))
    with pytest.raises(UnfiredFaultsError, match="step=1000"):
        run(plan)
    results = run(FaultPlan(*plan.faults, must_fire=False))
    assert results.faults is not None
    assert results.faults.unfired == plan.faults
    with pytest.raises(odb.ConfigError, match="only 2 ranks"):
        run(FaultPlan(KillRank(rank=2, step=0)))


def test_only_one_plan_is_active() -> None:
    refused = pytest.raises(odb.ConfigError, match="active already")
    with FaultPlan(must_fire=False), refused, FaultPlan():
        pass
    with FaultPlan():
        pass


def test_plans_are_plain_data() -> None:
    plan = FaultPlan(KillRank(rank=1, step=3), StopRank(rank=0, step=2, seconds=1.5))
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(plan) == hash(pickle.loads(pickle.dumps(plan)))
    assert "KillRank(rank=1, step=3" in repr(plan)
    with pytest.raises(AttributeError):
        plan.must_fire = False  # type: ignore[misc]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fault(rank=0),
        lambda: KillRank(rank=-1, step=0),
        lambda: KillRank(rank=0),
        lambda: KillRank(rank=0, step=1, round=1),
        lambda: KillRank(rank=True, step=1),
        lambda: KillWorker(rank=0),
        lambda: StopRank(rank=0, step=1, seconds=0),
        lambda: StopRank(rank=0, step=1, seconds=float("nan")),
        lambda: SlowRank(rank=0),
        lambda: SlowRank(rank=0, seconds_per_step=-1),
        lambda: DelayExchange(rank=0, round=1, seconds="1"),  # type: ignore[arg-type]
        lambda: FaultPlan(3),  # type: ignore[arg-type]
        lambda: FaultPlan(SlowRank(0, 1.0), SlowRank(0, 1.0)),
    ],
)
def test_faults_that_make_no_sense_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(odb.ConfigError):
        make()


def test_rank_is_that_of_the_whole_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a loader that batches by itself: every rank would be rank 0 else."""
    monkeypatch.setitem(os.environ, "RANK", "2")
    with FaultPlan(RaiseInBatch(rank=2, step=1)), pytest.raises(odb.PipelineError):
        steps_of(a_loader(group=None))
