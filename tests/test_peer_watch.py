"""Nobody hangs, nobody guesses: real ranks that are killed, frozen, stuck, or merely leave."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import odb
from odb.testing import run_ranks
from odb.testing.ranks import RankResults
from odb.watch import rendezvous, status, tree, watcher
from tests.checks import check_case
from tests.jobs import (
    Case,
    EpochOfRank,
    Shard,
    ShardDataset,
    join_queue_feeders,
    lengths,
    loader_for,
    observe,
    run_epoch,
)

SOON_S = 15.0
"""Far below the timeout of 1800 s that a rank would wait for otherwise."""

SIZE = 60

KNOWN_S = status.SILENT_S + 5 * watcher.BEAT_S
"""By then every rank has been told that a rank is silent: the neighbour notices it at a beat, the
others hear of it at the next ones, and busy cores delay beats."""


@dataclass
class Heard:
    """What a rank was told."""

    error: BaseException | None = None
    seconds: float = 0.0
    callbacks: list[int | None] = field(default_factory=list)
    callback_seconds: float | None = None
    logs: list[str] = field(default_factory=list)
    steps: int = 0


def shrink_the_tree() -> None:
    """Two children for each rank, so that a few ranks make a deep tree."""
    for function in (tree.parent, tree.children, tree.ancestors):
        function.__defaults__ = (2,)


class Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@contextmanager
def collected_logs() -> Iterator[list[str]]:
    handler = Collect()
    logger = logging.getLogger("odb")
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


class Trap(ShardDataset):
    """At one sample of one rank, something happens: `die`, or `sleep` for so many seconds."""

    def __init__(self, rank: int, at: dict[int, tuple[str, float]], clock: Path) -> None:
        super().__init__(Shard(lengths(SIZE, 10, 100)), rank)
        self.at, self.clock = at, clock
        self.sprung = False

    def __getitem__(self, index: int) -> Any:
        what, seconds = self.at.get(self.rank, ("", 0.0))
        if what and index == 20 and not self.sprung:
            self.sprung = True
            time.sleep(seconds)
            if what == "die":
                die(self.clock)
        return super().__getitem__(index)


def die(clock: Path) -> None:
    clock.write_text(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def since_death(clock: Path) -> float:
    return time.time() - float(clock.read_text())


def trap_loader(rank: int, at: dict[int, tuple[str, float]], clock: Path, **options: Any) -> Any:
    settings = {"token_budget": 256, "window": 8, "timeout": 1800.0, **options}
    return odb.ODBDataLoader(Trap(rank, at, clock), sampler=range(SIZE), **settings)


# ---------------------------------------------------------------- a rank that is killed


def survive(rank: int, world_size: int, where: str, clock: Path) -> Heard:
    """The last rank is killed while the others are in a certain place."""
    victim, heard = world_size - 1, Heard()
    at: dict[int, tuple[str, float]] = {}
    if where == "exchange":
        at = {victim: ("die", 1.0)}
    if where == "dataset":
        at = dict.fromkeys(range(victim), ("sleep", 60.0)) | {victim: ("die", 1.0)}

    def on_lost(error: odb.PeerLostError) -> None:
        heard.callbacks.append(error.rank)
        heard.callback_seconds = since_death(clock)
        raise ValueError("a callback that fails")

    loader = trap_loader(rank, at, clock, on_peer_lost=on_lost)
    with collected_logs() as logs:
        try:
            for _ in loader.steps():
                heard.steps += 1
                if where == "queue" and heard.steps == 2:
                    time.sleep(1.0)
                    if rank == victim:
                        die(clock)
                    while not heard.callbacks:  # the driver has filled the queue by now
                        time.sleep(0.01)
                if where == "gradient" and heard.steps == 3:
                    if rank == victim:
                        time.sleep(1.0)
                        die(clock)
                    with suppress(RuntimeError):
                        dist.all_reduce(torch.ones(4))  # as in DDP, where odb cannot interrupt
        except odb.ODBError as error:
            heard.error = error
            heard.seconds = since_death(clock)
        loader.close()
        heard.logs = logs
    return heard


@pytest.mark.parametrize("where", ["exchange", "queue", "gradient", "dataset"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_survivor_names_the_rank_that_was_killed(
    world_size: int, where: str, tmp_path: Path
) -> None:
    results: RankResults = run_ranks(
        survive, world_size, where, tmp_path / "clock",
        start_method="fork", timeout=60, check=False,
    )  # fmt: skip
    victim = world_size - 1
    assert [failure.rank for failure in results.failures] == [victim]
    for heard in results.values[:victim]:
        assert isinstance(heard.error, odb.PeerLostError)
        assert heard.error.rank == victim
        assert heard.error.step == heard.steps
        assert heard.callbacks[0] == victim
        assert heard.callback_seconds < SOON_S
        assert heard.seconds < SOON_S
        said = [line for line in heard.logs if f"lost rank {victim}:" in line]
        assert len(said) == 1
        assert said[0].startswith("ERROR")
        assert any("what is called for a lost rank failed" in line for line in heard.logs)
        print(where, world_size, round(heard.seconds, 3), round(heard.callback_seconds, 3))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_it_is_the_same_under_every_start_method(method: Any, tmp_path: Path) -> None:
    results: RankResults = run_ranks(
        survive, 3, "exchange", tmp_path / "clock",
        start_method=method, timeout=60, check=False,
    )  # fmt: skip
    assert [heard.error.rank for heard in results.values[:2]] == [2, 2]


def in_a_deep_tree(rank: int, world_size: int, victim: int, clock: Path) -> Heard:
    shrink_the_tree()
    heard = Heard()
    loader = trap_loader(rank, {victim: ("die", 2.0)}, clock)
    try:
        for _ in loader.steps():
            heard.steps += 1
    except odb.ODBError as error:
        heard.error, heard.seconds = error, since_death(clock)
    time.sleep(2.0)  # so that nobody hears of it by the others' leaving
    loader.close()
    return heard


@pytest.mark.parametrize("victim", [0, 1, 5])
def test_all_parts_of_a_tree_hear_of_a_rank_that_connected_them(
    victim: int, tmp_path: Path
) -> None:
    """Six ranks with two children each: rank 1 stands between 3, 4 and the rest."""
    results: RankResults = run_ranks(
        in_a_deep_tree, 6, victim, tmp_path / "clock",
        start_method="fork", timeout=60, check=False,
    )  # fmt: skip
    assert [failure.rank for failure in results.failures] == [victim]
    for heard in results.values[:victim] + results.values[victim + 1 :]:
        assert heard.error.rank == victim
        assert heard.seconds < SOON_S


def with_workers(rank: int, world_size: int, clock: Path) -> Heard:
    """Forked workers hold copies of all connections and outlive their rank by seconds."""
    heard = Heard()
    loader = trap_loader(rank, {}, clock, num_workers=2)
    try:
        for _ in loader.steps():
            heard.steps += 1
            if heard.steps == 2 and rank == 0:
                die(clock)
            time.sleep(0.5 if heard.steps == 2 else 0.05)
    except odb.ODBError as error:
        heard.error, heard.seconds = error, since_death(clock)
    loader.close()
    return heard


def test_forked_workers_do_not_hide_the_death_of_their_rank(tmp_path: Path) -> None:
    results: RankResults = run_ranks(
        with_workers, 3, tmp_path / "clock", start_method="fork", timeout=60, check=False
    )
    for heard in results.values[1:]:
        assert isinstance(heard.error, odb.PeerLostError)
        assert heard.error.rank == 0
        print("workers", round(heard.seconds, 3))


SCRIPT = """
import os, signal, sys, time
import torch.distributed as dist
import odb
rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world_size)
samples = [{"input_ids": [1] * (5 + i % 7)} for i in range(400)]
loader = odb.ODBDataLoader(samples, token_budget=32, window=8, num_workers=1)
how = sys.argv[4]
for number, _ in enumerate(loader.steps()):
    if number == 3 and rank == world_size - 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 3 and how == "leaves":
        break
    time.sleep(0.02)
"""


def run_script(how: str, world_size: int, folder: Path) -> list[tuple[int, str]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(world_size), str(folder / "store"), how],
            stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        return [(p.wait(), e) for p in processes for _, e in [p.communicate(timeout=60)]]
    finally:
        for process in processes:
            process.kill()


def test_survivors_that_raise_exit_by_themselves_without_noise(tmp_path: Path) -> None:
    """Also with an exchange left behind in Gloo, and nothing closed by hand."""
    *survivors, _ = run_script("killed", 3, tmp_path)
    for code, errors in survivors:
        assert code == 1
        assert errors.count("Traceback") == 1
        assert "odb.errors.PeerLostError: lost rank 2" in errors.rstrip().splitlines()[-1]
        assert "terminate called" not in errors


def test_leaving_a_script_is_no_loss(tmp_path: Path) -> None:
    for code, errors in run_script("leaves", 3, tmp_path):
        assert code == 0
        assert "lost" not in errors


# ---------------------------------------------------------------- a rank that does not answer


def freeze(folder: Path, seconds: float) -> None:
    """Stop the process that wrote down its id, for some seconds."""
    pid = int((folder / "pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()


def frozen(rank: int, world_size: int, victim: int, folder: Path) -> tuple[EpochOfRank, list[str]]:
    """A rank is stopped by the next one, in the middle of the epoch."""
    if rank == victim:
        (folder / "pid").write_text(str(os.getpid()))
    case = Case(CASE.shards, {"warn_after": 2.0, "timeout": 1800.0})
    with collected_logs() as logs:
        loader = loader_for(case, rank)
        record = EpochOfRank()
        steps = loader.steps()
        dist.barrier()
        for batch, info in steps:
            record.steps.append(observe(batch, info))
            if info.step == 2 and rank == victim + 1:
                freeze(folder, KNOWN_S + 3)
        record.filtered = list(loader.stats.filtered)
        record.complete = loader.stats.complete
        loader.close()
    return record, logs


CASE = Case((Shard(lengths(64, 10, 300)), Shard(lengths(50, 10, 300)), Shard(lengths(40, 10, 300))))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_rank_is_named_and_nothing_is_lost(victim: int, tmp_path: Path) -> None:
    """Rank 0 is the one that knows of all others: without it, each says what it knows itself."""
    ranks = run_ranks(frozen, 3, victim, tmp_path, start_method="fork", timeout=90)
    for rank in {0, 1, 2} - {victim}:
        warnings = [line for line in ranks[rank][1] if "has waited" in line]
        assert warnings, "a warning is due after 2 s"
        assert len(warnings) <= 3, "and again after 4 s and 8 s, not each second"
        assert any(f"rank {victim}: has not answered for" in line for line in warnings)
    for _, logs in ranks:
        assert not [line for line in logs if "lost rank" in line]
    check_case(CASE, [[record] for record, _ in ranks])


def frozen_for_too_long(rank: int, world_size: int, folder: Path) -> BaseException | None:
    if rank == 1:
        (folder / "pid").write_text(str(os.getpid()))
    loader = trap_loader(rank, {}, Path(os.devnull), timeout=KNOWN_S)
    steps = loader.steps()
    dist.barrier()
    try:
        for _, info in steps:
            if info.step == 2 and rank == 0:
                freeze(folder, KNOWN_S + 8)
            time.sleep(0.05)
    except odb.ODBError as error:
        return error
    finally:
        loader.close()
    return None


def test_a_rank_that_is_frozen_past_the_timeout_gets_the_same_error(tmp_path: Path) -> None:
    errors = run_ranks(frozen_for_too_long, 3, tmp_path, start_method="fork", timeout=60)
    for error in errors:
        assert isinstance(error, odb.ExchangeTimeoutError), errors
        assert error.missing == (1,)
        assert "has not answered" in error.report


def stuck(rank: int, world_size: int, at: int, seconds: float) -> tuple[Heard, list[str]]:
    heard = Heard()
    loader = trap_loader(
        rank, {at: ("sleep", seconds)}, Path(os.devnull), warn_after=1.5, timeout=5.0
    )
    started = time.monotonic()
    with collected_logs() as logs:
        try:
            for _ in loader.steps():
                heard.steps += 1
        except odb.ODBError as error:
            heard.error, heard.seconds = error, time.monotonic() - started
        again = None
        try:
            next(loader.steps())
        except odb.ODBError as error:
            again = type(error).__name__
        loader.close()
    return heard, [*logs, f"again: {again}"]


@pytest.mark.parametrize(("world_size", "at"), [(2, 0), (3, 1), (4, 3)])
def test_a_dataset_that_blocks_ends_in_a_timeout_that_says_so_on_every_rank(
    world_size: int, at: int
) -> None:
    """Promise: nobody hangs. The rank that is stuck gets the error, too."""
    ranks = run_ranks(stuck, world_size, at, 120.0, start_method="fork", timeout=60)
    steps = {heard.steps for heard, _ in ranks}
    assert len(steps) == 1, "all ranks end at the same step"
    for rank, (heard, logs) in enumerate(ranks):
        error = heard.error
        assert isinstance(error, odb.ExchangeTimeoutError), error
        assert error.missing == (at,)
        assert f"rank {at}: filling its window in round" in error.report
        assert "again: ExchangeTimeoutError" in logs
        warnings = [line for line in logs if "has waited" in line]
        assert bool(warnings) == (rank != at)
        assert not [line for line in logs if "lost rank" in line]


def slow(rank: int, world_size: int) -> tuple[int, list[str]]:
    with collected_logs() as logs:
        loader = trap_loader(rank, {1: ("sleep", 5.0)}, Path(os.devnull), warn_after=None)
        count = sum(info.local_samples for _, info in loader.steps())
        loader.close()
    return count, logs


def test_a_slow_rank_only_slows_things_down() -> None:
    for count, logs in run_ranks(slow, 3, start_method="fork", timeout=60):
        assert count == SIZE
        assert logs == []


# ---------------------------------------------------------------- ranks that leave


def leave(rank: int, world_size: int, how: str) -> list[str]:
    with collected_logs() as logs:
        loader = trap_loader(rank, {}, Path(os.devnull), on_peer_lost=lambda e: logs.append(str(e)))
        for number, _ in enumerate(loader.steps()):
            if how == "break" and number == 3 and rank == world_size - 1:
                break
        if how == "close" and rank == 0:
            loader.close()
        time.sleep(2.5 if rank else 0.0)
        if how != "drop":
            loader.close()
        return list(logs)


def close_too_early(rank: int, world_size: int) -> str:
    loader = trap_loader(rank, {}, Path(os.devnull))
    list(loader.steps())
    try:
        if rank == 1:
            loader.close()
            time.sleep(4.0)
            return ""
        time.sleep(1.0)
        list(loader.steps())
    except odb.ODBError as error:
        return str(error)
    finally:
        loader.close()
    return "no error"


def test_a_rank_that_closed_its_loader_while_others_go_on_is_named() -> None:
    said = run_ranks(close_too_early, 3, start_method="fork", timeout=60)
    assert ["lost rank 1 before step 0: it has closed" in said[rank] for rank in (0, 2)] == [
        True,
        True,
    ], said


KEPT: list[Any] = []


def keep_open(rank: int, world_size: int) -> None:
    """The loader is still open when the process of `multiprocessing` ends."""
    loader = trap_loader(rank, {}, Path(os.devnull), on_peer_lost=lambda error: os._exit(9))
    KEPT.append(loader)
    list(loader.steps())
    time.sleep(1.5 if rank else 0.0)


@pytest.mark.parametrize("how", ["break", "close", "drop"])
def test_leaving_is_no_loss(how: str) -> None:
    for logs in run_ranks(leave, 3, how, start_method="fork", timeout=60):
        assert not [line for line in logs if "lost" in line]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_end_of_a_process_is_no_loss(method: Any) -> None:
    assert run_ranks(keep_open, 3, start_method=method, timeout=60) == [None] * 3


def nothing_left(rank: int, world_size: int) -> tuple[list[str], int, int]:
    run_epoch(loader_for(CASE, rank))
    dist.barrier()
    time.sleep(0.2)
    join_queue_feeders()
    process = psutil.Process()
    before = process.num_fds()
    for _ in range(3):
        loader = loader_for(CASE, rank)
        run_epoch(loader)
        loader.close()
    dist.barrier()
    time.sleep(0.2)
    join_queue_feeders()
    return [t.name for t in threading.enumerate()], before, process.num_fds()


def test_no_thread_or_socket_is_left_after_close() -> None:
    for names, before, after in run_ranks(nothing_left, 3, start_method="fork", timeout=60):
        assert not [name for name in names if name.startswith("odb")]
        assert after <= before


def unreachable(rank: int, world_size: int) -> tuple[int, list[str]]:
    """As if a firewall stood between rank 1 and the others."""

    def refuse(*_: Any) -> Any:
        raise OSError("no route")

    if rank == 1:
        watcher.call_parent = refuse
    with collected_logs() as logs:
        loader = trap_loader(rank, {}, Path(os.devnull))
        count = sum(info.local_samples for _, info in loader.steps())
        loader.close()
    return count, logs


def test_without_a_connection_the_watch_warns_and_training_goes_on() -> None:
    ranks = run_ranks(unreachable, 3, start_method="fork", timeout=60)
    assert [count for count, _ in ranks] == [SIZE] * 3
    assert [len(logs) for _, logs in ranks] == [0, 1, 0]
    assert "cannot reach" in ranks[1][1][0]


def on_several_hosts(rank: int, world_size: int, clock: Path) -> Heard:
    rendezvous.host_identity = lambda: f"host {rank}"
    return survive(rank, world_size, "exchange", clock)


def test_ranks_on_several_hosts_meet_by_their_addresses(tmp_path: Path) -> None:
    """One machine that pretends: ranks listen on its outer address instead of the loop-back."""
    results: RankResults = run_ranks(
        on_several_hosts, 3, tmp_path / "clock", start_method="fork", timeout=60, check=False
    )
    assert [heard.error.rank for heard in results.values[:2]] == [2, 2]
