"""Worker processes that die, and samples that fail too often: typed errors on every rank."""

from __future__ import annotations

import gc
import logging
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import odb
from odb.testing import run_ranks
from odb.workers import REAP_S, WorkerReader


class Fatal(Dataset[Any]):
    """Sample `at` of rank 0 ends the worker that reads it. `size`: bytes of a sample."""

    def __init__(self, rank: int, at: int | None, how: str = "kill", size: int = 0) -> None:
        self.rank, self.at, self.how, self.size = rank, at, how, size

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> Any:
        if self.rank == 0 and index == self.at and get_worker_info() is not None:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(3)
        tokens = torch.arange(5 + index % 50)
        return {"input_ids": tokens, "raw": np.zeros(self.size, dtype=np.uint8)}


def train(loader: Any, pause: float = 0.0, kill_at: int | None = None) -> tuple[int, Any]:
    """Iterate; in step 3 be busy outside the loader, or kill a worker and be busy then."""
    steps = 0
    try:
        for _, info in loader.steps():
            steps += 1
            if info.step == kill_at:
                psutil.Process().children()[-1].kill()
            if info.step in (3, kill_at):
                end = time.monotonic() + pause
                while time.monotonic() < end:
                    time.sleep(0.001)
    except BaseException as error:
        return steps, error
    return steps, None


def lose_a_worker(rank: int, world_size: int, options: dict[str, Any]) -> tuple[int, Any, Any, int]:
    how, method = options.get("how", "kill"), options.get("method", "fork")
    loader = odb.ODBDataLoader(
        Fatal(rank, 200, how), sampler=range(600), token_budget=256, window=32, num_workers=2,
        multiprocessing_context=method, persistent_workers=True, chunk=8,
    )  # fmt: skip
    if options.get("other"):  # a loader of the user's, with PyTorch's own handler for its workers
        list(DataLoader(Fatal(rank, None), batch_size=100, num_workers=1, collate_fn=len))
    steps, error = train(loader, pause=2.0)
    cause = None if error is None else error.__cause__
    loader.dataset.at = None
    again, second = train(loader)
    loader.close()
    assert second is None, second
    return steps, error, cause, again


@pytest.mark.parametrize(
    "options",
    [{}, {"how": "exit"}, {"method": "spawn"}, {"other": True}],
    ids=["killed", "exits", "spawn", "beside another loader"],
)
def test_a_worker_that_dies_stops_all_ranks_at_the_same_step(options: dict[str, Any]) -> None:
    """Promise: uniform-abort. PyTorch would raise in the middle of the trainer's code."""
    first, second = run_ranks(lose_a_worker, 2, options, start_method="fork", timeout=90)
    assert first[0] == second[0] > 3
    assert isinstance(first[1], odb.PipelineError), first[1]
    lost = first[2]
    assert isinstance(lost, odb.WorkerLostError)
    assert lost.worker in (0, 1)
    assert lost.pid is not None
    killed = options.get("how", "kill") == "kill"
    assert (lost.signal, lost.exit_code) == (("SIGKILL", -9) if killed else (None, 3))
    assert isinstance(second[1], odb.PeerFailedError)
    assert f"worker {lost.worker} (pid {lost.pid})" in second[1].reason
    assert first[3] == second[3] > first[0], "the next epoch has new workers"


def test_a_worker_that_pytorch_ends_behind_the_last_sample_is_not_lost() -> None:
    """One that takes more than five seconds to end, as it is still importing, gets a SIGTERM from
    PyTorch, and the reader may notice that before it hears that there are no more items."""
    worker = mp.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()

    def items() -> Iterator[int]:
        yield 7
        worker.terminate()
        time.sleep(0.5)

    reader = WorkerReader(items(), [worker])
    assert (reader.next(), reader.next()) == (7, None)
    assert not reader.lost
    reader.close()


def test_a_worker_that_nobody_joined_leaves_no_pipes() -> None:
    """If the driver reads the exit code while PyTorch joins the worker, Python takes the process
    for one that still runs, and keeps its pipes."""

    def read() -> list[int | None]:
        worker = mp.get_context("fork").Process(target=int)
        worker.start()
        reader = WorkerReader(iter([7, 7]), [worker])
        got = [reader.next() for _ in range(3)]
        wait([worker.sentinel])
        assert worker.exitcode == 0
        reader.close()
        return got

    gc.collect()
    mp.active_children()  # joins those of earlier tests that have ended
    before = psutil.Process().num_fds()
    assert read() == [7, 7, None]
    assert psutil.Process().num_fds() <= before


class Terminated(Fatal):
    """Worker 0 gets a SIGTERM from somebody when it reads sample 200."""

    def __getitem__(self, index: int) -> Any:
        if index == 200 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return super().__getitem__(index)


def test_a_worker_that_somebody_terminates_is_named() -> None:
    loader = odb.ODBDataLoader(
        Terminated(0, None), sampler=range(600), token_budget=256, window=32, num_workers=1, chunk=8
    )
    _, error = train(loader)
    loader.close()
    assert error is not None
    assert isinstance(error.__cause__, odb.WorkerLostError)
    assert (error.__cause__.worker, error.__cause__.signal) == (0, "SIGTERM")


def lose_a_writer(rank: int, world_size: int) -> tuple[int, Any, Any]:
    """The worker is killed while it waits to write the rest of a large chunk."""
    loader = odb.ODBDataLoader(
        Fatal(rank, None, size=30_000), sampler=range(600), token_budget=512, window=32,
        num_workers=2,
    )  # fmt: skip
    steps, error = train(loader, pause=1.0, kill_at=6 if rank == 0 else None)
    loader.close()
    return steps, error, None if error is None else error.__cause__


def test_a_worker_that_is_killed_in_the_middle_of_a_message_hangs_nobody() -> None:
    """Whoever reads the rest of it waits for ever: PyTorch's reader does."""
    first, second = run_ranks(lose_a_writer, 2, start_method="fork", timeout=60)
    assert first[0] == second[0]
    assert isinstance(first[1], odb.PipelineError), first[1]
    assert isinstance(first[2], odb.WorkerLostError)
    assert isinstance(second[1], odb.PeerFailedError)
    assert "killed by SIGKILL" in second[1].reason


def test_other_loaders_keep_their_errors() -> None:
    """PyTorch's error for a worker of another DataLoader still comes in the main thread."""
    loader = odb.ODBDataLoader(Fatal(1, None), token_budget=256, num_workers=1)
    steps = loader.steps()
    next(steps)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(DataLoader(Fatal(0, 5), batch_size=4, num_workers=1, collate_fn=len))
    assert sum(1 for _ in steps) > 0
    loader.close()
    assert not [t for t in threading.enumerate() if t.name == "odb-reader"]


# ---------------------------------------------------------------- exit codes that prove nothing


def read_the_code_first(rank: int, world_size: int, method: str) -> tuple[list[Any], Any, bool]:
    context: Any = mp.get_context(method)
    worker = context.Process(target=time.sleep, args=(0,))
    worker.start()
    wait([worker.sentinel], 30)
    if method == "fork":
        os.waitpid(worker.pid, 0)
    else:
        os.read(worker.sentinel, 8)

    def items() -> Iterator[str]:
        for item in "ab":
            time.sleep(REAP_S * 1.2)
            yield item

    reader = WorkerReader(items(), [worker])
    read = [reader.next() for _ in range(3)]
    reader.close()
    return read, worker.exitcode, reader.lost


@pytest.mark.parametrize(("method", "code"), [("fork", None), ("forkserver", 255)])
def test_an_exit_code_that_another_has_read_is_no_proof(method: str, code: int | None) -> None:
    """Then Python does not know it, or says 255: the reader goes on to its end."""
    (found,) = run_ranks(read_the_code_first, 1, method, start_method="spawn", timeout=60)
    assert found == (["a", "b", None], code, False)


def test_what_is_read_soon_comes_before_an_exit_code() -> None:
    """A worker that failed after its last chunk does no harm; one that owes a chunk is lost."""
    worker = mp.get_context("fork").Process(target=os._exit, args=(3,))
    worker.start()
    wait([worker.sentinel], 30)
    over = threading.Event()

    def items() -> Iterator[str]:
        time.sleep(REAP_S / 5)
        yield "a"
        over.wait(30)

    reader = WorkerReader(items(), [worker])
    assert reader.next() == "a"
    with pytest.raises(odb.WorkerLostError, match="ended with exit code 3"):
        reader.next()
    assert reader.lost
    over.set()
    reader.close()


def forkserver_epochs(rank: int, world_size: int) -> list[Any]:
    mp.set_forkserver_preload(["odb", __name__])  # else each worker takes seconds to start
    loader = odb.ODBDataLoader(
        Fatal(rank, None), sampler=range(32), token_budget=256, window=16, num_workers=2,
        multiprocessing_context="forkserver",
    )  # fmt: skip
    errors = [train(loader)[1] for _ in range(40)]
    loader.close()
    return errors


def test_the_end_of_an_epoch_is_no_loss_of_a_worker() -> None:
    """PyTorch's thread and ours ask a forkserver for the same exit code."""
    assert run_ranks(forkserver_epochs, 1, start_method="spawn", timeout=90) == [[None] * 40]


class Uneven(IterableDataset[Any]):
    """The first of two workers has read all long before the second."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for i in range(10 if info is None or info.id == 0 else 80):
            time.sleep(0.005)
            yield {"input_ids": torch.arange(4 + i % 3)}


def reap_all(*_: Any) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def reaped_epochs(rank: int, world_size: int) -> list[Any]:
    signal.signal(signal.SIGCHLD, reap_all)
    loader = odb.ODBDataLoader(
        Uneven(), token_budget=64, window=16, num_workers=2, sharded="workers", chunk=4
    )
    seen = []
    for _ in range(2):
        seen.append(sum(len(info.sample_ids) for _, info in loader.steps()))
    loader.close()
    return seen


def test_a_handler_that_reaps_all_children_does_no_harm() -> None:
    assert run_ranks(reaped_epochs, 1, start_method="fork", timeout=60) == [[90, 90]]


# ---------------------------------------------------------------- between epochs


class Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def lose_between_epochs(rank: int, world_size: int) -> tuple[list[Any], list[str]]:
    logging.getLogger("odb").addHandler(logged := Logged())
    loader = odb.ODBDataLoader(
        Fatal(rank, None), sampler=range(100), token_budget=256, window=32, num_workers=2,
        persistent_workers=True,
    )  # fmt: skip
    epochs = [train(loader)]
    if rank == 0:
        psutil.Process().children()[-1].kill()
        end = time.monotonic() + 1.0
        while time.monotonic() < end:  # an evaluation, say: nothing may be raised here
            time.sleep(0.001)
    epochs += [train(loader), train(loader)]
    loader.close()
    return epochs, [text for text in logged.texts if "between epochs" in text]


def test_a_worker_that_dies_between_epochs_is_replaced() -> None:
    first, second = run_ranks(lose_between_epochs, 2, start_method="fork", timeout=60)
    assert first[0] == second[0] == [(first[0][0][0], None)] * 3
    (warning,) = first[1]
    assert "killed by SIGKILL" in warning
    assert "New workers" in warning
    assert second[1] == []


class Shy(list[int]):
    """A sampler that refuses epoch 1 on rank 0."""

    rank = 0

    def set_epoch(self, epoch: int) -> None:
        if epoch == 1 and self.rank == 0:
            raise ValueError("shy")


def fail_to_open(rank: int, world_size: int) -> tuple[list[Any], Any]:
    sampler = Shy(range(100))
    sampler.rank = rank
    loader = odb.ODBDataLoader(
        Fatal(rank, None), sampler=sampler, token_budget=256, window=32, num_workers=1,
        persistent_workers=True,
    )  # fmt: skip
    errors = [train(loader)[1] for _ in range(3)]
    loader.close()
    return errors, getattr(errors[1], "__cause__", None)


def test_a_rank_that_cannot_begin_an_epoch_ends_it_on_all() -> None:
    """Promise: uniform-abort."""
    (first, cause), (second, _) = run_ranks(fail_to_open, 2, start_method="fork", timeout=60)
    assert isinstance(first[1], odb.PipelineError), first[1]
    assert isinstance(cause, ValueError)
    assert isinstance(second[1], odb.PeerFailedError)
    assert "shy" in second[1].reason
    assert first[0] is first[2] is second[0] is second[2] is None


class Spawning(list[int]):
    """A sampler that starts a process of its own in the second epoch."""

    def __init__(self) -> None:
        super().__init__(range(200))
        self.epoch = 0
        self.started: Any = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.epoch == 1 and self.started is None:
            self.started = mp.get_context("fork").Process(target=time.sleep, args=(60,))
            self.started.start()
        return super().__iter__()


def test_a_process_of_the_users_is_not_taken_for_a_persistent_worker() -> None:
    sampler = Spawning()
    loader = odb.ODBDataLoader(
        Fatal(1, None), sampler=sampler, token_budget=64, window=8, num_workers=1, chunk=2,
        prefetch=1, persistent_workers=True,
    )  # fmt: skip
    whole, error = train(loader)
    assert error is None
    steps = loader.steps()
    next(steps)
    sampler.started.kill()
    sampler.started.join(30)
    assert sum(1 for _ in steps) == whole - 1
    loader.close()


# ---------------------------------------------------------------- samples that fail too often


class Sour(Dataset[Any]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        if self.rank == 1 and index in (10, 20, 30, 40):
            raise ValueError(f"sour {index}")
        return {"input_ids": [1] * (1 + index % 9)}


def skip(rank: int, world_size: int, most: int | None) -> tuple[int, Any, list[Any], Any]:
    loader = odb.ODBDataLoader(
        Sour(rank), sampler=range(100), token_budget=32, window=8, on_error="skip", max_skipped=most
    )
    steps, error = train(loader)
    filtered = [sample.sample_id for sample in loader.stats.filtered]
    loader.close()
    return steps, error, filtered, None if error is None else error.__cause__


@pytest.mark.parametrize("most", [0, 3])
def test_one_failure_too_many_fails_the_rank(most: int) -> None:
    first, second = run_ranks(skip, 2, most, start_method="fork", timeout=60)
    assert first[0] == second[0]
    assert isinstance(first[1], odb.PeerFailedError)
    assert "max_skipped" in first[1].reason
    assert isinstance(second[1], odb.PipelineError)
    assert isinstance(second[3], odb.TooManySkippedError)
    assert (second[3].skipped, second[3].sample) == (most, (10, 20, 30, 40)[most])
    assert second[2] == [10, 20, 30, 40][:most]


@pytest.mark.parametrize("most", [None, 4])
def test_as_many_failures_as_allowed_are_skipped(most: int | None) -> None:
    first, second = run_ranks(skip, 2, most, start_method="fork", timeout=60)
    assert first[1] is second[1] is None
    assert second[2] == [10, 20, 30, 40]


@pytest.mark.parametrize(
    "options",
    [
        {"max_skipped": 3},
        {"max_skipped": -1, "on_error": "skip"},
        {"max_skipped": True, "on_error": "skip"},
        {"warn_after": 0},
        {"warn_after": float("nan")},
        {"on_peer_lost": "log"},
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(odb.ConfigError, match=next(iter(options))):
        odb.ODBDataLoader([], token_budget=32, **options)
