"""Makes the faults of a plan happen, through the loader's hooks, and writes down that they did."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch.utils.data import get_worker_info

from odb.errors import ConfigError
from odb.hooks import Hooks, installed
from odb.info import SampleId
from odb.testing.faults import (
    BlockInSample,
    DelayExchange,
    DropConnection,
    Fault,
    FaultPlan,
    InjectedError,
    KillRank,
    KillWorker,
    RaiseInBatch,
    RaiseInSample,
    SlowRank,
    StopRank,
    UnfiredFaultsError,
)


@dataclass(frozen=True)
class Ledger:
    """Which faults of a plan have happened: a folder, with a file for each by its number in the
    plan. It is written before the fault happens, from any process, and survives all of them."""

    folder: str

    def claim(self, number: int) -> bool:
        """Write down that a fault happens now; False if it has happened before."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            descriptor = os.open(Path(self.folder, str(number)), flags, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            file.write(repr(time.time()))
        return True

    def times(self) -> dict[int, float]:
        """When each fault happened (`time.time`), by its number."""
        found = {}
        for path in Path(self.folder).iterdir():
            text = path.read_text()
            if text:
                found[int(path.name)] = float(text)
        return found


@dataclass(frozen=True)
class RankFaults:
    """The hooks of one rank: its faults, each with its number in the plan."""

    faults: tuple[tuple[int, Fault], ...]
    ledger: Ledger

    def on_sample(self, sample_id: SampleId) -> None:
        info = get_worker_info()
        worker = None if info is None else info.id
        for number, fault in self.faults:
            match fault:
                case SlowRank() if fault.seconds_per_sample:
                    self.ledger.claim(number)
                    time.sleep(fault.seconds_per_sample)
                case RaiseInSample() if fault.sample == sample_id and self.ledger.claim(number):
                    raise InjectedError(f"{fault}")
                case BlockInSample() if fault.sample == sample_id and self.ledger.claim(number):
                    time.sleep(fault.seconds)
                case KillWorker() if worker is not None:
                    meant = fault.worker in (None, worker) and fault.sample in (None, sample_id)
                    if meant and self.ledger.claim(number):
                        kill_this_process()

    def on_batch(self, epoch: int, step: int) -> None:
        for number, fault in self.faults:
            match fault:
                case RaiseInBatch() if fault.step == step and fault.epoch in (None, epoch):
                    if self.ledger.claim(number):
                        raise InjectedError(f"{fault}")

    def on_exchange(self, epoch: int, round_: int) -> None:
        for number, fault in self.faults:
            if not isinstance(fault, DelayExchange | DropConnection | KillRank):
                continue
            if fault.round != round_ or fault.epoch not in (None, epoch):
                continue
            if not self.ledger.claim(number):
                continue
            match fault:
                case DelayExchange():
                    time.sleep(fault.seconds)
                case DropConnection():
                    drop_connections()
                case KillRank():
                    kill_this_process()

    def on_step(self, epoch: int, step: int) -> None:
        for number, fault in self.faults:
            match fault:
                case SlowRank() if fault.seconds_per_step:
                    self.ledger.claim(number)
                    time.sleep(fault.seconds_per_step)
                case KillRank() | StopRank() if fault.step == step:
                    if fault.epoch in (None, epoch) and self.ledger.claim(number):
                        if isinstance(fault, StopRank):
                            stop_this_process(fault.seconds)
                        else:
                            kill_this_process()


class ActiveFaults:
    """A plan while it is active, and afterwards: which of its faults have happened.

    In the process of one rank that is about its own faults; `run_ranks` looks at all ranks'.
    """

    def __init__(self, plan: FaultPlan, ledger: Ledger) -> None:
        self.plan = plan
        self.ledger = ledger
        self._ranks: set[int] = set()
        self._times: dict[int, float] | None = None

    def hooks_of(self, rank: int) -> Hooks:
        """The hooks of a rank."""
        self._ranks.add(rank)
        faults = ((n, fault) for n, fault in enumerate(self.plan.faults) if fault.rank == rank)
        return RankFaults(tuple(faults), self.ledger)

    @property
    def times(self) -> dict[Fault, float]:
        """When each fault happened, by `time.time`."""
        times = self.ledger.times() if self._times is None else self._times
        return {self.plan.faults[number]: at for number, at in sorted(times.items())}

    @property
    def fired(self) -> tuple[Fault, ...]:
        """The faults that have happened."""
        return tuple(self.times)

    @property
    def unfired(self) -> tuple[Fault, ...]:
        """The faults that have not, of the ranks that began an epoch (of all, if none did)."""
        fired = set(self.times)
        return tuple(
            fault
            for fault in self.plan.faults
            if fault not in fired and (not self._ranks or fault.rank in self._ranks)
        )

    def require_fired(self, context: str = "") -> None:
        """Raise UnfiredFaultsError if the plan demands that all happen, and some have not."""
        if self.plan.must_fire and self.unfired:
            raise UnfiredFaultsError(self.unfired, context)

    def settle(self) -> None:
        """Keep what is known, as the ledger goes away."""
        self._times = self.ledger.times()


_STACK: list[tuple[ActiveFaults, ExitStack]] = []


def activate(plan: FaultPlan, ledger: Ledger | None = None) -> ActiveFaults:
    """Make a plan's faults happen in this process from now on. `ledger`: of the harness that
    started this rank, else this process gets its own. Raises ConfigError if a plan is active."""
    with ExitStack() as stack:
        if ledger is None:
            ledger = Ledger(tempfile.mkdtemp(prefix="odb-faults-"))
            stack.callback(shutil.rmtree, ledger.folder, ignore_errors=True)
        active = ActiveFaults(plan, ledger)
        stack.callback(active.settle)
        try:
            stack.enter_context(installed(active.hooks_of))
        except ConfigError:
            raise ConfigError(
                "a FaultPlan is active already in this process: put all faults into one plan"
            ) from None
        _STACK.append((active, stack.pop_all()))
    return active


def deactivate(plan: FaultPlan) -> ActiveFaults:
    """End the plan that is active."""
    active, stack = _STACK.pop()
    assert active.plan is plan
    stack.close()
    return active


# ---------------------------------------------------------------- what happens


def kill_this_process() -> None:
    """As the system does that runs out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal may reach another thread first


WAKER = """
import os, select, signal, sys
print(flush=True)
select.select([0], [], [], float(sys.argv[2]))
os.kill(int(sys.argv[1]), signal.SIGCONT)
"""
"""Continues a process that is stopped; ends at once when that is gone, as its input ends then."""


def stop_this_process(seconds: float) -> None:
    """Stop all threads of this process; a process that is started before continues it."""
    waker = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", WAKER, str(os.getpid()), str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with waker:
        assert waker.stdout is not None
        waker.stdout.readline()
        os.kill(os.getpid(), signal.SIGSTOP)
        # The signal may take a moment to reach this thread. Leaving closes the waker's input.
        while waker.poll() is None:
            time.sleep(0.01)


def drop_connections() -> int:
    """Shut down every TCP connection of this process; returns how many.

    All at once: a thread of this process that noticed the first one could still tell the peers
    behind the others who is gone. So nothing else of Python's runs in between: these calls keep
    the interpreter's lock, where those of `socket` let go of it.
    """
    keeping_the_lock = ctypes.PyDLL(None)
    handles = []
    with ExitStack() as stack:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                connection = stack.enter_context(socket.socket(fileno=os.dup(int(name))))
                tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                if tcp and connection.type == socket.SOCK_STREAM and connection.getpeername():
                    handles.append(connection.fileno())
        time.sleep(0)  # so that nobody has waited for the lock for long
        for handle in handles:
            keeping_the_lock.shutdown(handle, int(socket.SHUT_RDWR))
    return len(handles)
