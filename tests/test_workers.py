"""Worker processes that die, and samples that fail too often: typed errors on every rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import odb
from odb.testing import run_ranks


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
