"""A neighbour in the tree: the connection to it and what it was last heard to do."""

from __future__ import annotations

import socket
import time

from odb.watch.status import SILENT_S, Doing, Seen, Status
from odb.watch.wire import LONGEST_GREETING, LONGEST_LINE, Line


class Edge:
    """The connection to a neighbour. `rank` None: a caller that has not said who it is. `answered`:
    something has come from the neighbour, so that it is one, and no go-between."""

    def __init__(self, sock: socket.socket, rank: int | None) -> None:
        self.line = Line(sock)
        self.line.longest = LONGEST_GREETING if rank is None else LONGEST_LINE
        self.rank = rank
        self.answered = False
        self.heard = time.monotonic()
        self.seen = Seen(Status(Doing.STARTING), self.heard)
        self.said_bye = False

    def greet(self, rank: int) -> None:
        """The caller has said who it is."""
        self.rank = rank
        self.line.longest = LONGEST_LINE

    def say_bye(self) -> None:
        """The neighbour said goodbye."""
        self.said_bye = True
        self.seen = Seen(self.seen.status._replace(doing=Doing.CLOSED), time.monotonic())

    def current(self, now: float) -> Seen:
        """What the neighbour does, and whether it is silent."""
        silent = now - self.heard > SILENT_S and not self.said_bye
        return self.seen._replace(silent_since=self.heard if silent else None)
