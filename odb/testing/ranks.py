"""Starts local ranks as real processes, gives each a Gloo process group, and collects results."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from odb.errors import ODBError

StartMethod = Literal["fork", "spawn", "forkserver"]


@dataclass(frozen=True)
class RankFailure:
    """How a rank failed: its error with traceback, or why there is none (killed, timed out)."""

    rank: int
    error: BaseException | None
    description: str


class RankError(ODBError):
    """At least one rank did not return; `failures` holds one entry for each such rank."""

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        super().__init__(
            "\n".join(f"rank {failure.rank}: {failure.description}" for failure in failures)
        )
        self.failures = tuple(failures)


@dataclass(frozen=True)
class RankResults:
    """What the ranks returned (None where one failed), and the failures."""

    values: tuple[Any, ...]
    failures: tuple[RankFailure, ...]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    start_method: StartMethod = "spawn",
    timeout: float = 120.0,
    check: bool = True,
    process_group: bool = True,
) -> Any:
    """Run `fn(rank, world_size, *args)` on every rank of a local job and return what they return.

    Each rank is a process of its own, with RANK, WORLD_SIZE and LOCAL_RANK set, one thread for
    torch, and (unless `process_group=False`) an initialised Gloo process group. `fn`, `args` and
    results must be picklable, for "fork" only the results.

    A rank that has not returned after `timeout` seconds is ended, and so is every other rank that
    this call started; nothing else is touched. With `check` (default), returns the list of values
    and raises RankError if a rank failed; without, returns RankResults.
    """
    context = mp.get_context(start_method)
    with tempfile.TemporaryDirectory(prefix="odb-ranks-") as folder:
        rendezvous = str(Path(folder, "store")) if process_group else None
        job = _Job(world_size, rendezvous, timeout)
        processes: list[BaseProcess] = []
        readers: list[Connection] = []
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(  # type: ignore[attr-defined]
                    target=_rank_main, args=(fn, rank, job, args, writer), name=f"rank-{rank}"
                )
                process.start()
                writer.close()
                processes.append(process)
                readers.append(reader)
            results = _collect(readers, processes, timeout)
        finally:
            for process in processes:
                _end(process)
    if check:
        if results.failures:
            raise RankError(results.failures) from results.failures[0].error
        return list(results.values)
    return results


@dataclass(frozen=True)
class _Job:
    world_size: int
    rendezvous: str | None
    timeout: float


def _rank_main(
    fn: Callable[..., Any], rank: int, job: _Job, args: tuple[Any, ...], writer: Connection
) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(job.world_size), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1"
    )
    torch.set_num_threads(1)
    try:
        if job.rendezvous is not None:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{job.rendezvous}",
                rank=rank,
                world_size=job.world_size,
                timeout=timedelta(seconds=job.timeout),
            )
        value = fn(rank, job.world_size, *args)
        message = pickle.dumps((value, None, ""))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        message = pickle.dumps((None, _picklable(error), text))
    writer.send_bytes(message)
    writer.close()
    if job.rendezvous is not None and dist.is_initialized():
        dist.destroy_process_group()


def _picklable(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _collect(
    readers: list[Connection], processes: list[BaseProcess], timeout: float
) -> RankResults:
    values: list[Any] = [None] * len(readers)
    failures: dict[int, RankFailure] = {}
    waiting: dict[Any, int] = {reader: rank for rank, reader in enumerate(readers)}
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for reader in ready:
            rank = waiting.pop(reader)
            try:
                value, error, text = pickle.loads(reader.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join(5)
                code = processes[rank].exitcode
                failures[rank] = RankFailure(
                    rank, None, f"ended without a result, exit code {code}"
                )
                continue
            values[rank] = value
            if text:
                failures[rank] = RankFailure(rank, error, text)
    for rank in waiting.values():
        failures[rank] = RankFailure(rank, None, f"had not returned after {timeout:g} s")
    return RankResults(tuple(values), tuple(failures[rank] for rank in sorted(failures)))


def _end(process: BaseProcess) -> None:
    process.join(5)
    for stop in (process.terminate, process.kill):
        if process.is_alive():
            stop()
            process.join(5)
