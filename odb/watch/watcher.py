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
BYE: Message = {"t": "bye"}
MEETING_S = 60.0
"""How long a rank listens for its children."""
FAREWELL_S = 1.0
"""How long a rank that closes waits for its neighbours to have heard of it."""
ENTRIES_OF_A_LINE = 1000
GREETING_S = 10.0
"""How long a caller may take to say who it is."""
MOST_CALLERS = 128
"""Callers that have not said who they are: one more, and the oldest has to go."""


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
        self._selector: selectors.BaseSelector = selectors.SelectSelector()  # takes no file
        self._bell: list[socket.socket] = []
        self._requests: deque[Message] = deque()
        self._closing = False
        self._calling: socket.socket | None = None
        self._parent: Edge | None = None
        self._edges: list[Edge] = []
        self._deadline = time.monotonic() + MEETING_S
        self._thread = threading.Thread(target=self._run, name="odb-watch", daemon=True)
        _ALL.add(self)
        try:
            with _FORKING:
                self._selector = selectors.DefaultSelector()
                self._bell += socket.socketpair()
            self._thread.start()
        except (OSError, RuntimeError) as error:  # the other ranks do not know: go on as they do
            self._warn_unreachable(error)
            self._release()

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
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(FAREWELL_S + 2)

    def _request(self, message: Message) -> None:
        self._requests.append(message)
        self._nudge()

    def _nudge(self) -> None:
        for wake in self._bell[:1]:
            with contextlib.suppress(OSError):  # closed, or woken already
                wake.send(b"!", socket.MSG_DONTWAIT)

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
        except BaseException:
            self._log_failure()
        self._closing = True
        try:
            self._farewell()  # also after a failure: neighbours would take it for a death
        except BaseException:
            self._log_failure()
        finally:
            self._release()

    def _log_failure(self) -> None:
        with contextlib.suppress(BaseException):  # a filter or a handler of the user's may fail
            logger.exception(
                "odb: the peer watch of rank %d failed; the loader goes on without it",
                self._place.rank,
            )

    def _connect(self) -> None:
        _, woken = self._bell
        woken.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ, self._drain)
        self._listen()
        if self._place.rank == 0:
            return
        try:
            sock = call_parent(self._place, self._make)
        except OSError as error:
            self._warn_unreachable(error)
            return
        self._parent = self._roster.above = self._join(sock, parent(self._place.rank))
        token = self._place.offer.token if self._place.offer else ""
        self._send(self._parent, {"t": "hello", "rank": self._place.rank, "token": token})

    def _warn_unreachable(self, reason: object) -> None:
        if not self._closing:
            logger.warning(
                "odb: rank %d cannot reach the rank that watches it (%s). Training goes on; if a "
                "rank dies or hangs, errors on this rank may not name it",
                self._place.rank,
                reason,
            )

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
        try:
            with _FORKING:
                sock, _ = listener.accept()
                self._join(sock, None)
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # such as no more files: until the next beat
            self._selector.unregister(listener)
            return
        with contextlib.suppress(OSError):  # it has gone again
            keep_alive(sock)
        callers = [edge for edge in self._edges if edge.rank is None]
        for edge in callers[:-MOST_CALLERS]:
            self._drop(edge)

    def _drain(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.recv(4096)

    def _attend(self, seconds: float) -> None:
        """Hear what neighbours and other threads want, for up to some seconds."""
        for key, events in self._selector.select(seconds):
            assert isinstance(key.fileobj, socket.socket)
            if key.fileobj.fileno() < 0:  # dropped since
                continue
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
                edge.answered = True
                self._take(edge, message)
        except Exception as error:  # whatever it is: one connection must not end the watch
            if edge.rank is not None:
                edge.line.send(BYE)  # this rank goes on
            self._drop(edge)
            logger.warning("odb: closing a connection of the peer watch: %r", error)
            return
        if ended:
            self._end(edge)

    def _end(self, edge: Edge) -> None:
        """The connection to a neighbour has ended."""
        self._drop(edge)
        if edge.rank is None or edge.said_bye or self._closing:
            return
        if edge.answered:
            reason = "the connection to its process ended without a goodbye"
            self._lose(edge.rank, reason, edge)
            return
        # A go-between took the call, or a parent that then stopped listening.
        self._roster.above = None
        self._warn_unreachable("the connection ended before it answered")

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
        edge.greet(rank)
        self._send(edge, {"t": "welcome"})
        for lost in [self.verdicts.first] if isinstance(self.verdicts.first, LostRank) else []:
            self._send(edge, {"t": "lost", "rank": lost.rank, "reason": lost.reason})
        if not self._place.waiting:
            self._stop_listening()
        if self._closing:
            self._part(edge)

    def _lose(self, rank: int, reason: str, source: Edge | None) -> None:
        # First the other ranks: a listener of this one may end its process, and then they would
        # take this rank for the one that was lost.
        if self.verdicts.add(LostRank(rank, reason)):
            self._flood({"t": "lost", "rank": rank, "reason": reason}, source)
            self.verdicts.tell()

    def _overdue(self, message: Message, source: Edge | None) -> None:
        if self.verdicts.add(Overdue(unpack_late(message["late"], time.monotonic()))):
            self._flood(message, source)
            self.verdicts.tell()

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
        for edge in [e for e in self._edges if e.rank is None and now - e.heard > GREETING_S]:
            self._drop(edge)
        if now > self._deadline:
            self._stop_listening()
        self._listen()

    # ------------------------------------------------------------ the end

    def _farewell(self) -> None:
        for edge in self._edges:
            if edge.rank is not None:
                self._part(edge)
        self._listen()
        deadline = time.monotonic() + FAREWELL_S
        while self._expects() and time.monotonic() < deadline:
            self._attend(max(0.0, deadline - time.monotonic()))
            for edge in [edge for edge in self._edges if edge.said_bye]:
                self._drop(edge)

    def _part(self, edge: Edge) -> None:
        self._send(edge, BYE)
        if not edge.line.unsent:
            edge.line.finish()

    def _expects(self) -> bool:
        """Whether a neighbour has yet to say goodbye, or a child to call and hear it."""
        coming = bool(self._place.waiting and self._place.listeners)
        return coming or any(edge.rank is not None for edge in self._edges)

    def _drop(self, edge: Edge) -> None:
        if edge in self._edges:
            with _FORKING:
                self._edges.remove(edge)
                self._selector.unregister(edge.line.socket)
                edge.line.close()
        if edge is self._parent:
            self._parent = None

    def _listen(self) -> None:
        for listener in self._place.listeners:
            if listener not in self._selector.get_map():
                self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def _stop_listening(self) -> None:
        for listener in self._place.listeners:
            if listener in self._selector.get_map():
                self._selector.unregister(listener)
            listener.close()
        self._place.listeners = []
        for edge in [edge for edge in self._edges if edge.rank is None]:
            self._drop(edge)

    def _release(self) -> None:
        for sock in self.sockets():
            sock.close()
        self._selector.close()
        _ALL.discard(self)

    def sockets(self) -> list[socket.socket]:
        """Every socket that is open."""
        lines = [edge.line.socket for edge in self._edges]
        calling = [] if self._calling is None else [self._calling]
        return [*self._bell, *self._place.listeners, *lines, *calling]

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
