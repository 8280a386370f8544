"""Starts local ranks as real processes, gives each a Gloo process group, and collects results."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from odb.errors import ConfigError, ODBError
from odb.testing.faults import FaultPlan
from odb.testing.injection import ActiveFaults, Ledger, activate, deactivate

StartMethod = Literal["fork", "spawn", "forkserver"]

EXIT_S = 20.0
"""How long the process of a rank that has returned may take to end. On a busy machine, unloading
torch alone may take seconds."""


@dataclass(frozen=True)
class RankFailure:
    """How a rank failed: its error with traceback, or why there is none (killed, timed out).
    hangs: it had not returned in time."""

    rank: int
    error: BaseException | None
    description: str
    hangs: bool = False


class RankError(ODBError):
    """At least one rank did not return; `failures` holds one entry for each such rank."""

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        super().__init__(
            "\n".join(f"rank {failure.rank}: {failure.description}" for failure in failures)
        )
        self.failures = tuple(failures)


@dataclass(frozen=True)
class RankResults:
    """What the ranks returned (None where one failed), and the failures.

    exit_codes: of their processes, negative for a signal; one that did not end by itself was ended
    by SIGTERM or SIGKILL. faults: what became of the plan that was passed.
    """

    values: tuple[Any, ...]
    failures: tuple[RankFailure, ...]
    exit_codes: tuple[int | None, ...] = ()
    faults: ActiveFaults | None = None


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    start_method: StartMethod = "spawn",
    timeout: float = 120.0,
    check: bool = True,
    process_group: bool = True,
    faults: FaultPlan | None = None,
) -> Any:
    """Run `fn(rank, world_size, *args)` on every rank of a local job and return what they return.

    Each rank is a process of its own, with RANK, WORLD_SIZE and LOCAL_RANK set, one thread for
    torch, and (unless `process_group=False`) an initialised Gloo process group. `fn`, `args` and
    results must be picklable, for "fork" only the results.

    A rank that has not returned after `timeout` seconds is ended, and so is every other rank that
    this call started, with the processes that ranks started; nothing else is touched. With `check`
    (default), returns the list of values and raises RankError if a rank failed; without, returns
    RankResults.

    `faults` happen to the ranks that they name (see `odb.testing.FaultPlan`). Raises
    UnfiredFaultsError if one of them never did, unless the plan says `must_fire=False`.
    """
    if faults is not None:
        _check_ranks(faults, world_size)
    context = mp.get_context(start_method)
    with tempfile.TemporaryDirectory(prefix="odb-ranks-") as folder:
        rendezvous = str(Path(folder, "store")) if process_group else None
        active = None if faults is None else ActiveFaults(faults, _ledger(folder))
        job = _Job(world_size, rendezvous, timeout, active)
        processes: list[BaseProcess] = []
        readers: list[Connection] = []
        results = RankResults((), ())
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
            stuck = {failure.rank for failure in results.failures if failure.hangs}
            for rank, process in enumerate(processes):
                _end(process, EXIT_S if results.values and rank not in stuck else 0.5)
        codes = tuple(process.exitcode for process in processes)
        if active is not None:
            active.settle()
    results = replace(results, exit_codes=codes, faults=active)
    if active is not None and not (check and results.failures):
        active.require_fired(_summary(results.failures))
    if check:
        if results.failures:
            raise RankError(results.failures) from results.failures[0].error
        return list(results.values)
    return results


def _ledger(folder: str) -> Ledger:
    path = Path(folder, "faults")
    path.mkdir()
    return Ledger(str(path))


def _check_ranks(plan: FaultPlan, world_size: int) -> None:
    for fault in plan.faults:
        if fault.rank >= world_size:
            raise ConfigError(f"{fault}: there are only {world_size} ranks")


def _summary(failures: Sequence[RankFailure]) -> str:
    last = (f"rank {f.rank}: {f.description.rstrip().splitlines()[-1]}" for f in failures)
    return "\n".join(last)


@dataclass(frozen=True)
class _Job:
    world_size: int
    rendezvous: str | None
    timeout: float
    faults: ActiveFaults | None


def _rank_main(
    fn: Callable[..., Any], rank: int, job: _Job, args: tuple[Any, ...], writer: Connection
) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(job.world_size), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1"
    )
    torch.set_num_threads(1)
    os.setpgid(0, 0)  # so that what it starts can be ended with it
    try:
        if job.rendezvous is not None:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{job.rendezvous}",
                rank=rank,
                world_size=job.world_size,
                timeout=timedelta(seconds=job.timeout),
            )
        with _faults_of(job):
            value = fn(rank, job.world_size, *args)
        message = pickle.dumps((value, None, ""))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        message = pickle.dumps((None, _picklable(error), text))
    writer.send_bytes(message)
    writer.close()
    if job.rendezvous is not None and dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _faults_of(job: _Job) -> Iterator[None]:
    if job.faults is None:
        yield
        return
    plan = job.faults.plan
    activate(plan, job.faults.ledger)
    try:
        yield
    finally:
        deactivate(plan)


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
    while waiting and time.monotonic() < deadline:
        # In slices: a process that a dead rank has left behind may hold its ends of all pipes.
        gone = [reader for reader, rank in waiting.items() if not processes[rank].is_alive()]
        ready = wait(list(waiting), max(0.0, min(0.2, deadline - time.monotonic())))
        for reader in gone:
            if reader not in ready:
                reader.close()
        for reader in {*ready, *gone}:
            rank = waiting.pop(reader)
            try:
                value, error, text = pickle.loads(reader.recv_bytes())
            except (EOFError, OSError):
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
        description = f"had not returned after {timeout:g} s"
        failures[rank] = RankFailure(rank, None, description, hangs=True)
    return RankResults(tuple(values), tuple(failures[rank] for rank in sorted(failures)))


def _end(process: BaseProcess, grace: float) -> None:
    process.join(grace)
    for stop in (process.terminate, process.kill):
        if process.is_alive():
            stop()
            process.join(5)
    # Workers of a rank that was killed: PyTorch's end within seconds, or, if they had only just
    # been started, never.
    if process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
