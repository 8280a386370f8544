"""The life of a loader's epochs: one driver thread at a time, and what outlives it."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from odb.batches import Delivery
from odb.info import ODBStepInfo
from odb.interpreter import Interpreter
from odb.outbox import Outbox
from odb.shell import LoaderShell
from odb.transport import Transport

EXIT_GRACE_S = 2.0
"""How long the interpreter's exit waits for a loader to tell its peers that it stops."""


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

    def __init__(self, outbox: Outbox[Delivery], loader: object) -> None:
        self._outbox = outbox
        # `for batch in ODBDataLoader(...)` holds nothing but this iterator.
        self._loader = loader

    def __next__(self) -> tuple[Any, ODBStepInfo]:
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

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._driver: Driver | None = None
        _OPEN.add(self)

    def begin(self, interpreter: Interpreter, shell: LoaderShell, outbox: Outbox[Delivery]) -> None:
        """Start driving an epoch. The one before must have ended."""
        self._driver = Driver(interpreter, shell, outbox)

    def finish_epoch(self, timeout: float | None = None) -> bool:
        """Stop the epoch if it still runs, and wait until all ranks have agreed on its end.

        Raises the error of an epoch that failed after this rank's trainer had left it.
        """
        if self._driver is None:
            return True
        self._driver.stop()
        if not self._driver.join(timeout):
            return False
        driver, self._driver = self._driver, None
        if driver.unheard_error is not None:
            raise driver.unheard_error
        return True

    def close(self, timeout: float = 0.0) -> None:
        """End the epoch and give up the exchange. If the other ranks do not agree on the end
        within `timeout` seconds, a background thread waits for them."""
        if self._finished(timeout):
            self.transport.close()
        else:
            threading.Thread(target=self._close_later, name="odb-close", daemon=True).start()
        _OPEN.discard(self)

    def _close_later(self) -> None:
        self._finished(None)
        self.transport.close()

    def _finished(self, timeout: float | None) -> bool:
        try:
            return self.finish_epoch(timeout)
        except Exception:  # the epoch's error, which nobody asked for: closing is no place to fail
            return True


_OPEN: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for session in list(_OPEN):
        session._finished(EXIT_GRACE_S)
