"""What a rank knows of the others, what it tells its neighbours of them, and when it warns."""

from __future__ import annotations

import logging
from typing import Any

from odb.watch.edge import Edge
from odb.watch.status import SILENT_S, WAITING, Late, Seen, late_ranks, report, unpack

logger = logging.getLogger("odb")

MOST_SENT = 32
"""Late ranks that are named to other ranks."""


class Roster:
    """The statuses of all ranks below this one in the tree (the root's are those of all ranks), and
    which ranks are late. `above`: the neighbour towards the root, also when it is gone."""

    def __init__(self, rank: int, warn_after: float | None) -> None:
        self.late: tuple[Late, ...] = ()
        self.above: Edge | None = None
        self._rank = rank
        self._warn_after = warn_after
        self._below: dict[int, Seen] = {}
        self._news: set[int] = set()
        self._told_at = 0.0
        self._told: tuple[Late, ...] = ()
        self._waiting_since = 0.0
        self._next_warning = 0.0

    def note(self, edge: Edge, message: dict[str, Any], now: float) -> None:
        """A neighbour's heartbeat. Raises ValueError, KeyError or TypeError if it is none."""
        for packed in message["seen"]:
            rank, seen = unpack(packed, now)
            if rank == edge.rank:
                edge.seen = seen
            if edge is not self.above:
                self._below[rank] = seen
                self._news.add(rank)
        if edge is self.above:
            self._told_at, self._told = now, unpack_late(message["late"], now)

    def look(self, own: Seen, below: list[Edge], now: float) -> None:
        """Bring up to date which neighbours are silent and which ranks are late."""
        for edge in below:
            assert edge.rank is not None
            current = edge.current(now)
            if current.silent_since is not None or current != self._below.get(edge.rank):
                self._below[edge.rank] = current
                self._news.add(edge.rank)
        if self._told and now - self._told_at < SILENT_S:
            self.late = self._told
            return
        # This is the root, or the root says nothing: then what is known here has to do.
        known = {**self._below, self._rank: own}
        if self.above is not None and self.above.rank is not None:
            known[self.above.rank] = self.above.current(now)
        self.late = late_ranks(known, now)

    def said_bye(self, edge: Edge) -> None:
        """A neighbour has closed its loader."""
        if edge is not self.above and edge.rank is not None:
            self._below[edge.rank] = edge.seen
            self._news.add(edge.rank)

    def news(self, own: Seen, now: float) -> list[list[Any]]:
        """What the rank above has not been told yet, this rank's own status first."""
        entries = [own.pack(self._rank, now)]
        entries += [self._below[rank].pack(rank, now) for rank in sorted(self._news)]
        self._news.clear()
        return entries

    def warn(self, own: Seen, now: float) -> None:
        """Log who is waited for, when this rank has waited for long: again after twice as long."""
        if self._warn_after is None or own.status.doing not in WAITING:
            return
        if own.since != self._waiting_since:
            self._waiting_since, self._next_warning = own.since, self._warn_after
        waited = now - own.since
        if waited < self._next_warning:
            return
        while self._next_warning <= waited:
            self._next_warning *= 2
        logger.warning(
            "odb: rank %d has waited %.0f s in round %d of epoch %d (before step %d) for: %s",
            self._rank,
            waited,
            own.status.round,
            own.status.epoch,
            own.status.step,
            report(self.late),
        )


def pack_late(late: tuple[Late, ...]) -> list[Any]:
    """As it crosses to another rank."""
    return [
        [rank, status.doing.name, *status[1:], round(for_s, 2), silent]
        for rank, status, for_s, silent in late[:MOST_SENT]
    ]


def unpack_late(packed: list[Any], now: float) -> tuple[Late, ...]:
    """What `pack_late` made."""
    late = []
    for entry in packed:
        rank, seen = unpack(entry, now)
        silent = None if seen.silent_since is None else now - seen.silent_since
        late.append(Late(rank, seen.status, now - seen.since, silent))
    return tuple(late)
