"""The life of a loader's epochs: one driver thread at a time, and what outlives it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from odb.batches import Delivery
from odb.errors import ODBError, PeerLostError
from odb.farewell import at_exit
from odb.faults import timed_out
from odb.info import ODBStepInfo
from odb.interpreter import Interpreter
from odb.outbox import Outbox
from odb.shell import LoaderShell
from odb.transport import Transport
from odb.watch.status import Doing
from odb.watch.verdict import LostRank, Overdue, Verdict

logger = logging.getLogger("odb")

EXIT_GRACE_S = 2.0
"""How long the interpreter's exit waits for a loader to tell its peers that it stops."""

BROKEN_GRACE_S = 1.0
"""How long an epoch may still take that cannot go on, as a rank is lost or stuck: this rank's own
driver may be stuck in the dataset."""

OnPeerLost = Callable[[PeerLostError], None]


class Driver:
    """Runs an epoch's interpreter in a thread, until its end is agreed on with all ranks."""

    def __init__(
        self, interpreter: Interpreter, shell: LoaderShell, outbox: Outbox[Delivery]
    ) -> None:
        self._interpreter = interpreter
        self._shell = shell
        self._outbox = outbox
        # A daemon, so that a job whose ranks fell out of step can still exit.
        self._thread = threading.Thread(target=self._run, name="odb-driver", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._interpreter.run()
        except BaseException as error:
            self._shell.crashed(error)

    @property
    def unheard_error(self) -> BaseException | None:
        """How the epoch failed, if the trainer had left it and was not told."""
        return self._outbox.unheard

    @property
    def next_step(self) -> int:
        """The step that the trainer would take next."""
        return self._outbox.taken

    def drop_steps(self, error_at: Callable[[int], BaseException]) -> None:
        """Give the trainer an error at once, instead of the steps from some number on."""
        self._shell.drop(self._outbox.fail(error_at))

    def finish(self, error: BaseException) -> None:
        """Give the trainer this error behind what is queued."""
        self._outbox.finish(error)

    def stop(self) -> None:
        """Tell the protocol that the trainer takes no more steps; does not wait."""
        self._outbox.close()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the epoch; whether it was reached."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()


class StepIterator(Iterator[tuple[Any, ODBStepInfo]]):
    """Yields an epoch's (batch, info) pairs. Dropping it before its end closes the epoch: this
    rank's next report says so, and the epoch ends on all ranks at the same step."""

    def __init__(
        self, outbox: Outbox[Delivery], loader: object, on_step: Callable[[int], None]
    ) -> None:
        self._outbox = outbox
        self._on_step = on_step
        # `for batch in ODBDataLoader(...)` holds nothing but this iterator.
        self._loader = loader

    def __next__(self) -> tuple[Any, ODBStepInfo]:
        self._on_step(self._outbox.taken)
        delivery = self._outbox.take()
        if delivery is None:
            raise StopIteration
        return delivery.batch, delivery.info

    def close(self) -> None:
        """Take no more steps. Does not wait for the other ranks."""
        self._outbox.close()

    def __del__(self) -> None:
        self._outbox.close()


class Session:
    """What a loader holds between epochs: its exchange and the driver of its latest epoch."""

    def __init__(
        self, transport: Transport, timeout: float, on_peer_lost: OnPeerLost | None = None
    ) -> None:
        self.transport = transport
        self._timeout = timeout
        self._on_peer_lost = on_peer_lost
        self._driver: Driver | None = None
        self._broken: ODBError | None = None
        _OPEN.add(self)
        at_exit(_close_all)
        transport.listen(self._hear)

    def _hear(self, verdict: Verdict) -> None:
        """The exchange is found to be broken. Called in the thread of the watch, so that the
        trainer hears of it whatever the driver is doing."""
        driver = self._driver
        step = 0 if driver is None else driver.next_step
        match verdict:
            case LostRank(rank, reason):
                lost = PeerLostError(rank=rank, step=step, reason=reason)
                self._report(lost)
                self._broken = self._broken or lost
                if driver is not None:
                    driver.drop_steps(lost.before)
                if self._on_peer_lost is not None:
                    self._on_peer_lost(lost)
            case Overdue(late):
                self._broken = self._broken or timed_out(step, self._timeout, late)
                # A driver that reads has handed over all steps that the ranks have agreed on. Any
                # other finds out by itself when it comes to its next exchange.
                if driver is not None and self._doing is Doing.PULLING:
                    driver.finish(self._broken)

    @property
    def _doing(self) -> Doing:
        return self.transport.activity.seen.status.doing

    def _report(self, lost: PeerLostError) -> None:
        status = self.transport.activity.seen.status
        level = logging.ERROR if self._broken is None else logging.INFO
        logger.log(
            level,
            "odb: lost rank %s: %s. Rank %d (epoch %d, round %d, step %d) was last: %s. Its "
            "trainer gets a PeerLostError in place of its next step",
            lost.rank,
            lost.reason,
            self.transport.seat.rank,
            status.epoch,
            status.round,
            lost.step,
            status.sentence(),
        )

    def begin(self, interpreter: Interpreter, shell: LoaderShell, outbox: Outbox[Delivery]) -> None:
        """Start driving an epoch. The one before must have ended."""
        self._driver = Driver(interpreter, shell, outbox)

    def finish_epoch(self, timeout: float | None = None) -> bool:
        """Stop the epoch if it still runs, and wait until all ranks have agreed on its end.

        Raises the error of an epoch that failed after this rank's trainer had left it, and that
        of an exchange that is broken if this rank's driver does not come back.
        """
        if self._driver is None:
            return True
        self._driver.stop()
        if not self._driver.join(timeout if self._broken is None else BROKEN_GRACE_S):
            if self._broken is not None:
                raise self._broken
            return False
        driver, self._driver = self._driver, None
        if driver.unheard_error is not None:
            raise driver.unheard_error
        return True

    def close(self, timeout: float = 0.0) -> None:
        """End the epoch and give up the exchange. If the other ranks do not agree on the end
        within `timeout` seconds, a background thread waits for them."""
        _OPEN.discard(self)
        if self._finished(timeout):
            self.transport.close()
        else:
            later = threading.Thread(target=self._close_later, name="odb-close", daemon=True)
            _CLOSING[self] = later
            later.start()

    def _close_later(self) -> None:
        self._finished(None)
        self.transport.close()
        _CLOSING.pop(self, None)

    def _finished(self, timeout: float | None) -> bool:
        try:
            return self.finish_epoch(timeout)
        except Exception:  # the epoch's error, which nobody asked for: closing is no place to fail
            return True


_OPEN: weakref.WeakSet[Session] = weakref.WeakSet()
_CLOSING: dict[Session, threading.Thread] = {}
"""Those that nobody has any more, whose epochs the other ranks have yet to end, and who waits."""


def _close_all() -> None:
    """Leave no rank in doubt: one that ends in the middle of an epoch says nothing, and is lost.
    One whose epoch is over, and which only waits for its workers, is not in the middle of it."""
    closing = dict(_CLOSING)
    for session in (*_OPEN, *closing):
        if session._finished(EXIT_GRACE_S) or session._doing in (Doing.BETWEEN, Doing.STARTING):
            session.transport.say_bye()
        if session in closing:
            # A thread that destroys a group when Python exits would abort the process.
            closing[session].join(EXIT_GRACE_S)
