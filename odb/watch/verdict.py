"""What the watch has found out, and who is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from odb.watch.status import Late

logger = logging.getLogger("odb")


class LostRank(NamedTuple):
    """The process of a rank is gone."""

    rank: int
    reason: str


class Overdue(NamedTuple):
    """An exchange was not complete in time, because of these ranks."""

    late: tuple[Late, ...]


Verdict = LostRank | Overdue
Listener = Callable[[Verdict], None]


class Verdicts:
    """The verdicts so far. The first one holds: the exchange cannot go on after it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lost: list[LostRank] = []
        self._untold: list[Verdict] = []
        self._listener: Listener | None = None
        self.first: Verdict | None = None

    def add(self, verdict: Verdict) -> bool:
        """Add one, and wake who waits for it; False if it was known. `tell` is still to come."""
        with self._changed:
            if isinstance(verdict, LostRank):
                if any(lost.rank == verdict.rank for lost in self._lost):
                    return False
                self._lost.append(verdict)
            elif self.first is not None:
                return False
            self.first = self.first or verdict
            self._untold.append(verdict)
            self._changed.notify_all()
        return True

    def tell(self) -> None:
        """Tell the listener, in this thread, what it has not been told. It may be the user's code:
        it may block, or end the process."""
        while True:
            with self._changed:
                listener = self._listener
                if listener is None or not self._untold:
                    return
                verdict = self._untold.pop(0)
            _tell(listener, verdict)

    def wait(self, seconds: float) -> Verdict | None:
        """The first verdict, if there is one within some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.first, seconds)
            return self.first

    def listen(self, listener: Listener | None) -> None:
        """Who is told, once for each verdict; of earlier ones at once."""
        with self._changed:
            self._listener = listener
            self._untold = list(self._lost)
            if isinstance(self.first, Overdue):
                self._untold.append(self.first)
        self.tell()


def _tell(listener: Listener, verdict: Verdict) -> None:
    try:
        listener(verdict)
    except BaseException:  # also a SystemExit: it would end the watch, and no program
        logger.exception("odb: what is called for a lost rank failed")
