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
        self._listener: Listener | None = None
        self.first: Verdict | None = None

    def add(self, verdict: Verdict) -> bool:
        """Add one, and tell the listener in this thread; False if it was known."""
        with self._changed:
            if isinstance(verdict, LostRank):
                if any(lost.rank == verdict.rank for lost in self._lost):
                    return False
                self._lost.append(verdict)
            elif self.first is not None:
                return False
            self.first = self.first or verdict
            listener = self._listener
            self._changed.notify_all()
        if listener is not None:
            _tell(listener, verdict)
        return True

    def wait(self, seconds: float) -> Verdict | None:
        """The first verdict, if there is one within some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.first, seconds)
            return self.first

    def listen(self, listener: Listener | None) -> None:
        """Who is told, once for each verdict; of earlier ones at once."""
        with self._changed:
            self._listener = listener
            known: list[Verdict] = list(self._lost)
            if isinstance(self.first, Overdue):
                known.append(self.first)
        if listener is not None:
            for verdict in known:
                _tell(listener, verdict)


def _tell(listener: Listener, verdict: Verdict) -> None:
    try:
        listener(verdict)
    except Exception:
        logger.exception("odb: what is called for a lost rank failed")
