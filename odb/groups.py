"""Which ranks a loader aligns, and the Gloo group of its own that it does it over."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from odb.errors import NotDistributedError
from odb.sharding import Seat

GroupChoice = Literal["world"] | dist.ProcessGroup | None
"""Which ranks are aligned: all, those of a process group, or (None) this one by itself."""

ALONE = Seat(0, 1)


@dataclass(frozen=True)
class OwnGroup:
    """A group that no other loader uses. release: gives it back; told whether it is broken."""

    group: dist.ProcessGroup
    release: Callable[[dist.ProcessGroup, bool], None]


def seat_in(choice: GroupChoice) -> Seat:
    """This rank's seat in the group. Raises NotDistributedError if there should be one and is not.

    Never silently alone: without a process group, a job that was started as several ranks gets an
    error, unless the caller asked for `group=None`.
    """
    if choice is None:
        return ALONE
    if not (dist.is_available() and dist.is_initialized()):
        world = os.environ.get("WORLD_SIZE", "1")
        if choice != "world" or world not in ("", "1"):
            raise NotDistributedError(
                f"WORLD_SIZE is {world}, but there is no process group to align ranks over: call "
                "torch.distributed.init_process_group before iterating, or pass group=None if "
                "this rank is to form batches by itself"
            )
        return ALONE
    group = dist.group.WORLD if choice == "world" else choice
    rank = dist.get_rank(group)
    if rank < 0:
        raise NotDistributedError("this rank is not a member of the group that it passed")
    return Seat(rank, dist.get_world_size(group))


def global_rank() -> int:
    """This process's rank among all of the job, whatever group a loader aligns."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK") or 0)


def own_group(choice: dist.ProcessGroup | Literal["world"], seat: Seat, timeout: float) -> OwnGroup:
    """A new Gloo group for the ranks of the choice, or one that is free (collective)."""
    wait = timedelta(seconds=timeout)
    if choice == "world" or seat.world_size == dist.get_world_size():
        made = dist.new_group(backend="gloo", timeout=wait, group_desc="odb")
        return OwnGroup(made, _destroy)
    return _SUBGROUPS.take(choice, seat, wait)


def _destroy(group: dist.ProcessGroup, broken: bool) -> None:
    dist.destroy_process_group(group)


class _Subgroups:
    """Gloo groups over some of the ranks, reused instead of destroyed.

    PyTorch names a group that only its members create after its ranks and the number of groups
    alive, and never clears the name's entries in its store. A group made after an equal one was
    destroyed finds the old addresses there and hangs (measured: torch 2.13). So these live as long
    as the process, and a later loader over the same ranks takes a free one. Which one, the members
    agree on, as they may have closed their loaders in different orders. And members that have
    different numbers of groups, as first and later pipeline stages have, would wait for each other
    under different names: whoever has fewer first makes some of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
        self._free: dict[tuple[int, ...], set[int]] = {}

    def take(self, over: dist.ProcessGroup, seat: Seat, timeout: timedelta) -> OwnGroup:
        """A group for exactly the ranks of `over`, which no other loader uses."""
        ranks = tuple(dist.get_process_group_ranks(over))
        with self._lock:
            made = self._made.setdefault(ranks, [])
            free = self._free.setdefault(ranks, set())
            offers: list[Any] = [None] * seat.world_size
            dist.all_gather_object(offers, sorted(free.copy()), group=over)
            common = set.intersection(*(set(offer) for offer in offers))
            if common:
                number = min(common)
                free.remove(number)
            else:
                number = len(made)
                _even_out(over, seat, timeout)
                made.append(
                    dist.new_group(
                        list(ranks),
                        backend="gloo",
                        timeout=timeout,
                        use_local_synchronization=True,
                        group_desc="odb",
                    )
                )

        def release(group: dist.ProcessGroup, broken: bool) -> None:
            # Without the lock: a loader may be finalized in the middle of `take`, in its thread.
            if not broken:  # a broken one is of no use to anybody
                free.add(number)

        return OwnGroup(made[number], release)


MOST_GROUPS = 4096
"""Of a process, as far as they are counted."""


def _even_out(over: dist.ProcessGroup, seat: Seat, timeout: timedelta) -> None:
    """See to it that all members have as many groups as the one that has most (collective)."""
    counts: list[int | None] = [None] * seat.world_size
    dist.all_gather_object(counts, _make_filler(timeout), group=over)
    known = [count for count in counts if count is not None]
    mine = counts[seat.rank]
    if mine is not None and len(known) == len(counts):
        for _ in range(max(known) - mine):
            _make_filler(timeout)


def _make_filler(timeout: timedelta) -> int | None:
    """Make a group of this rank alone; returns how many groups there were before it. PyTorch tells
    that only in the group's name, a hash of rank and number (None: of something else)."""
    rank = dist.get_rank()
    filler = dist.new_group(
        [rank],
        backend="gloo",
        timeout=timeout,
        use_local_synchronization=True,
        group_desc="odb filler",
    )
    for count in range(MOST_GROUPS):
        name = hashlib.sha1(f"{rank}_{count}".encode(), usedforsecurity=False).hexdigest()
        if name == filler.group_name:
            return count
    return None


_SUBGROUPS = _Subgroups()
