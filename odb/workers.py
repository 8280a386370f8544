"""Reads from a DataLoader's worker processes, and notices at once when one of them dies.

PyTorch raises for a dead worker in the main thread, wherever that is, and in the thread that reads
only after up to 5 s, or never: a worker that is killed while it writes leaves half a message, and
whoever reads it waits for the rest. So chunks are read in a thread that may be left behind, and the
driver waits for it and for the end of any worker, whichever comes first.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakSet

from odb.errors import WorkerLostError

logger = logging.getLogger("odb")

T = TypeVar("T")

REAP_S = 1.0
"""How long to wait for the exit code of a worker that has ended."""

SHUTDOWN_S = 6.0
"""How long PyTorch waits for each worker to end by itself behind the last item (5 s), and some
more. One that takes longer, as it is still importing, say, gets a SIGTERM."""

UNKNOWN_CODE = 255
"""What Python says of a forkserver's process when another thread has read its exit code first."""

_OURS: WeakSet[BaseProcess] = WeakSet()
"""The workers that are waited for here: while a reader or, between epochs, a source has them."""


class _Result(NamedTuple):
    value: Any
    error: BaseException | None


class WorkerReader(Generic[T]):
    """The items of an iterator that gets them from these worker processes (in order of their
    numbers). Raises WorkerLostError when one of them dies."""

    def __init__(self, items: Iterator[T], workers: Sequence[BaseProcess]) -> None:
        self._workers = list(workers)
        self._running = list(workers)
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._results: SimpleQueue[_Result] = SimpleQueue()
        self._ready, self._readied = mp.Pipe(duplex=False)
        self._lost = False
        _OURS.update(workers)
        self._thread = threading.Thread(
            target=self._read, args=(items,), name="odb-reader", daemon=True
        )
        self._thread.start()

    def _read(self, items: Iterator[T]) -> None:
        while self._requests.get():
            try:
                result = _Result(next(items, None), None)
            except BaseException as error:
                result = _Result(None, error)
            self._results.put(result)
            self._readied.send_bytes(b"!")

    def next(self) -> T | None:
        """The next item; None behind the last."""
        self._requests.put(True)
        while True:
            ready = wait([self._ready, *(worker.sentinel for worker in self._running)])
            if self._ready in ready:
                self._ready.recv_bytes()
                return self._outcome(self._results.get())
            self._check()

    def _outcome(self, result: _Result) -> T | None:
        if isinstance(result.error, RuntimeError):
            lost = self._find_lost(result.error)
            if lost is not None:
                self._lost = True
                raise lost from result.error
        if result.error is not None:
            raise result.error
        value: T | None = result.value
        return value

    def _check(self) -> None:
        """Raise if a worker has died; one may also end because it has read all.

        Only a signal is proof by itself, and SIGTERM is not: PyTorch sends it to slow workers at
        the end. With that, or an exit code, the reader has some time to come to an end of its own.
        Without one, as when a handler of the user's reaps all children, the worker is left to
        PyTorch, which looks for dead ones every few seconds.
        """
        for worker in list(self._running):
            if not wait([worker.sentinel], 0):
                continue
            code = _exit_code(worker, self._ready.poll)
            if code is None and self._ready.poll():
                return
            if code in (0, None, UNKNOWN_CODE):
                self._running.remove(worker)
                continue
            if self._ready.poll(self._patience(code)):
                return  # if it did die, the next item will not come
            self._lost = True
            raise self._error(worker, code)

    def _patience(self, code: int) -> float:
        """How long a reader may take to come to its end after a worker ended like this."""
        if code == -signal.SIGTERM:
            return SHUTDOWN_S * (len(self._workers) + 1)
        return REAP_S if code > 0 else 0.0

    def _find_lost(self, error: RuntimeError) -> WorkerLostError | None:
        """Which worker PyTorch complains of, if of any."""
        if not _pids_in(str(error)):
            return None
        for worker in self._workers:
            if worker.pid in _pids_in(str(error)):
                return self._error(worker, _exit_code(worker, _sleep))
        return WorkerLostError(worker=None, pid=None, signal=None, exit_code=None)

    def _error(self, worker: BaseProcess, code: int | None) -> WorkerLostError:
        return _lost_error(self._workers.index(worker), worker, code)

    @property
    def lost(self) -> bool:
        """Whether a worker has died: then the DataLoader is of no use any more."""
        return self._lost

    def close(self) -> None:
        """Let go of the iterator, in the thread that read from it."""
        self._requests.put(False)
        if not self._lost:  # else it may wait for the rest of a message
            self._thread.join()
            self._ready.close()
            self._readied.close()
        for worker in self._workers:
            _let_go(worker)


def _let_go(worker: BaseProcess) -> None:
    """Close the pipes of a worker that has ended.

    Python does so for whoever joins it. If the driver has read the exit code in the moment in which
    PyTorch joined, neither has: the pipes would stay until the next process starts.
    """
    with contextlib.suppress(AssertionError):  # in a forked child: it is not this process's
        worker.join(0)


def find_ended(workers: Sequence[BaseProcess]) -> list[WorkerLostError]:
    """Those of the workers (in order of their numbers) that have ended, and how."""
    return [
        _lost_error(number, worker, _exit_code(worker, _sleep))
        for number, worker in enumerate(workers)
        if wait([worker.sentinel], 0)
    ]


def _lost_error(number: int, worker: BaseProcess, code: int | None) -> WorkerLostError:
    name = None
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
    return WorkerLostError(worker=number, pid=worker.pid, signal=name, exit_code=code)


def _exit_code(worker: BaseProcess, pause: Callable[[float], bool]) -> int | None:
    """How a process ended. Another thread may be asking just now, and then it is known soon.

    pause: waits so many seconds; true if there is no need to know any more.
    """
    deadline = time.monotonic() + REAP_S
    while worker.exitcode is None and time.monotonic() < deadline:
        if pause(0.005):
            break
    return worker.exitcode


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _pids_in(text: str) -> set[int]:
    """The workers that an error of PyTorch is about."""
    found = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", text)
    return set() if found is None else {int(pid) for pid in found[1].split(",")}


class _Spared:
    """A handler of SIGCHLD that does what another does, but raises nothing for workers that are
    waited for here: the driver reports those, and the trainer hears of them in its next step."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, number: int, frame: Any) -> None:
        try:
            self._inner(number, frame)
        except RuntimeError as error:
            if not _pids_in(str(error)) & {worker.pid for worker in _OURS}:
                raise
            logger.debug("odb: a worker has ended: %s", error)


def spare_the_trainer() -> None:
    """Keep PyTorch from raising for our workers in the middle of the trainer's code. Call it in the
    main thread, when there are workers; elsewhere it does nothing."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and not isinstance(handler, _Spared):
        signal.signal(signal.SIGCHLD, _Spared(handler))
