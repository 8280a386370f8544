"""The thread that watches the other ranks: heartbeats, losses, and reports of late ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque

from odb.watch.activity import Activity
from odb.watch.edge import Edge
from odb.watch.rendezvous import Place, call_parent, keep_alive, token_fits
from odb.watch.roster import Roster, pack_late, unpack_late
from odb.watch.status import Late
from odb.watch.tree import parent
from odb.watch.verdict import LostRank, Overdue, Verdicts
from odb.watch.wire import Message, WireError

logger = logging.getLogger("odb")

BEAT_S = 1.0
MEETING_S = 60.0
"""How long a rank listens for its children."""
FAREWELL_S = 1.0
"""How long a rank that closes waits for its neighbours to have heard of it."""
ENTRIES_OF_A_LINE = 1000


class Watch:
    """Watches the other ranks of a loader. It never raises in the threads of others.

    `verdicts` says what it has found out, `late()` which ranks the others wait for. All
    connections belong to the thread; others only leave requests.
    """

    def __init__(self, place: Place, activity: Activity, warn_after: float | None) -> None:
        self.verdicts = Verdicts()
        self._place = place
        self._activity = activity
        self._roster = Roster(place.rank, warn_after)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._requests: deque[Message] = deque()
        self._closing = False
        self._calling: socket.socket | None = None
        self._parent: Edge | None = None
        self._edges: list[Edge] = []
        self._deadline = time.monotonic() + MEETING_S
        _ALL.add(self)
        self._thread = threading.Thread(target=self._run, name="odb-watch", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ for other threads

    def late(self) -> tuple[Late, ...]:
        """The ranks that the exchange waits for, as far as is known."""
        return self._roster.late

    def overdue(self) -> tuple[Late, ...]:
        """An exchange of this rank was not complete in time: tell all. Returns who is late."""
        late = self._roster.late
        self._request({"t": "overdue", "late": pack_late(late)})
        return late

    def close(self) -> None:
        """Say goodbye and end. Ranks that close are not lost."""
        self._closing = True
        self._nudge()
        if self._thread is not threading.current_thread():
            self._thread.join(FAREWELL_S + 2)

    def _request(self, message: Message) -> None:
        self._requests.append(message)
        self._nudge()

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):  # closed, or woken already
            self._wake.send(b"!", socket.MSG_DONTWAIT)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._connect()
            next_beat = time.monotonic()
            while not self._closing:
                self._attend(max(0.0, next_beat - time.monotonic()))
                if time.monotonic() >= next_beat:
                    self._beat(time.monotonic())
                    next_beat = time.monotonic() + BEAT_S
            self._farewell()
        except Exception:
            logger.exception(
                "odb: the peer watch of rank %d failed; the loader goes on without it",
                self._place.rank,
            )
        finally:
            self._release()

    def _connect(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._woken.setblocking(False)
        for listener in self._place.listeners:
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
        if self._place.rank == 0:
            return
        try:
            sock = call_parent(self._place, self._make)
        except OSError as error:
            logger.warning(
                "odb: rank %d cannot reach the rank that watches it (%s). Training goes on; if a "
                "rank dies or hangs, errors on this rank may not name it",
                self._place.rank,
                error,
            )
            return
        self._parent = self._roster.above = self._join(sock, parent(self._place.rank))
        token = self._place.offer.token if self._place.offer else ""
        self._send(self._parent, {"t": "hello", "rank": self._place.rank, "token": token})

    def _join(self, sock: socket.socket, rank: int | None) -> Edge:
        edge = Edge(sock, rank)
        self._edges.append(edge)
        self._selector.register(sock, selectors.EVENT_READ, edge)
        return edge

    def _make(self, family: int) -> socket.socket:
        with _FORKING:
            self._calling = socket.socket(family)
            return self._calling

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError), _FORKING:
            sock, _ = listener.accept()
            keep_alive(sock)
            self._join(sock, None)

    def _drain(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.recv(4096)

    def _attend(self, seconds: float) -> None:
        """Hear what neighbours and other threads want, for up to some seconds."""
        for key, events in self._selector.select(seconds):
            if not isinstance(key.data, Edge):
                key.data(key.fileobj)
                continue
            if events & selectors.EVENT_WRITE:
                self._send(key.data, None)
            if events & selectors.EVENT_READ:
                self._hear(key.data)
        while self._requests:
            self._overdue(self._requests.popleft(), None)

    def _send(self, edge: Edge, message: Message | None) -> None:
        if message is None:
            edge.line.flush()
        else:
            edge.line.send(message)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if edge.line.unsent else 0)
        self._selector.modify(edge.line.socket, wanted, edge)

    def _flood(self, message: Message, source: Edge | None) -> None:
        for edge in self._edges:
            if edge is not source and edge.rank is not None:
                self._send(edge, message)

    # ------------------------------------------------------------ hearing

    def _hear(self, edge: Edge) -> None:
        try:
            messages, ended = edge.line.receive()
            for message in messages:
                edge.heard = time.monotonic()
                self._take(edge, message)
        except (WireError, ValueError, KeyError, TypeError) as error:
            logger.warning("odb: closing a connection of the peer watch: %r", error)
            self._drop(edge)
            return
        if not ended:
            return
        self._drop(edge)
        rank = edge.rank
        if rank is not None and not edge.said_bye and not self._closing:
            self._lose(rank, "the connection to its process ended without a goodbye", edge)

    def _take(self, edge: Edge, message: Message) -> None:
        if edge.rank is None:
            self._greet(edge, message)
            return
        match message["t"]:
            case "beat":
                self._roster.note(edge, message, time.monotonic())
            case "lost":
                self._lose(int(message["rank"]), str(message["reason"]), edge)
            case "overdue":
                self._overdue(message, edge)
            case "bye":
                edge.say_bye()
                self._roster.said_bye(edge)

    def _greet(self, edge: Edge, message: Message) -> None:
        rank = message.get("rank")
        if rank not in self._place.waiting or not token_fits(self._place, message.get("token")):
            raise WireError("a caller is no rank of this job")
        self._place.waiting.remove(rank)
        edge.rank = rank
        for lost in [self.verdicts.first] if isinstance(self.verdicts.first, LostRank) else []:
            self._send(edge, {"t": "lost", "rank": lost.rank, "reason": lost.reason})
        if not self._place.waiting:
            self._stop_listening()

    def _lose(self, rank: int, reason: str, source: Edge | None) -> None:
        if self.verdicts.add(LostRank(rank, reason)):
            self._flood({"t": "lost", "rank": rank, "reason": reason}, source)

    def _overdue(self, message: Message, source: Edge | None) -> None:
        if self.verdicts.add(Overdue(unpack_late(message["late"], time.monotonic()))):
            self._flood(message, source)

    # ------------------------------------------------------------ saying

    def _beat(self, now: float) -> None:
        own, roster = self._activity.seen, self._roster
        below = [e for e in self._edges if e.rank is not None and e is not self._parent]
        roster.look(own, below, now)
        if self._parent is not None and not self._parent.line.unsent:
            news = roster.news(own, now)
            for first in range(0, len(news), ENTRIES_OF_A_LINE):
                part = news[first : first + ENTRIES_OF_A_LINE]
                self._send(self._parent, {"t": "beat", "seen": part})
        down: Message = {"t": "beat", "seen": [own.pack(self._place.rank, now)]}
        down["late"] = pack_late(roster.late)
        for edge in below:
            if not edge.line.unsent:
                self._send(edge, down)
        roster.warn(own, now)
        if self._place.listeners and now > self._deadline:
            self._stop_listening()

    # ------------------------------------------------------------ the end

    def _farewell(self) -> None:
        for edge in list(self._edges):
            self._send(edge, {"t": "bye"})
            edge.line.finish()
        deadline = time.monotonic() + FAREWELL_S
        while self._edges and time.monotonic() < deadline:
            self._attend(deadline - time.monotonic())
            for edge in [edge for edge in self._edges if edge.said_bye]:
                self._drop(edge)

    def _drop(self, edge: Edge) -> None:
        if edge in self._edges:
            self._edges.remove(edge)
            self._selector.unregister(edge.line.socket)
            edge.line.close()
        if edge is self._parent:
            self._parent = None

    def _stop_listening(self) -> None:
        for listener in self._place.listeners:
            self._selector.unregister(listener)
            listener.close()
        self._place.listeners = []

    def _release(self) -> None:
        for sock in self.sockets():
            sock.close()
        self._selector.close()
        _ALL.discard(self)

    def sockets(self) -> list[socket.socket]:
        """Every socket that is open."""
        lines = [edge.line.socket for edge in self._edges]
        calling = [] if self._calling is None else [self._calling]
        return [self._wake, self._woken, *self._place.listeners, *lines, *calling]

    def forget(self) -> None:
        """In a forked child: let go of the parent's connections, so that they end with it."""
        for sock in self.sockets():
            sock.close()
        self._selector.close()


_ALL: weakref.WeakSet[Watch] = weakref.WeakSet()


_FORKING = threading.Lock()
"""Held by whoever forks, and while a connection is made that a child would not know of: a worker
that outlives its rank must let go of it, or nobody hears of the rank's death."""


def _after_fork() -> None:
    _FORKING.release()
    for watch in list(_ALL):
        watch.forget()
    _ALL.clear()


os.register_at_fork(
    before=_FORKING.acquire, after_in_parent=_FORKING.release, after_in_child=_after_fork
)
