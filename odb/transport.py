"""The exchange between ranks: the only module that talks to torch.distributed.

A loader gets a Gloo group of its own, so that its exchanges, which run in the background, can never
be confused with the trainer's collectives or with those of another loader.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from odb.errors import NotDistributedError, ODBError
from odb.sharding import Seat

GroupChoice = Literal["world"] | dist.ProcessGroup | None
"""Which ranks are aligned: all, those of a process group, or (None) this one by itself."""


class LinkBroken(ODBError):
    """An exchange failed: another rank is gone (or this loader was shut down)."""


class LinkTimeout(LinkBroken):
    """An exchange was not complete in time."""


class Transport(Protocol):
    """What a rank needs of the others. Every rank makes the same calls in the same order."""

    seat: Seat

    def maximum(self, values: Sequence[int]) -> tuple[int, ...]:
        """Element-wise maximum over all ranks."""

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        """Element-wise sum over all ranks."""

    def broadcast(self, value: Any, source: int) -> Any:
        """The value that rank `source` passes (what the others pass is ignored)."""

    def close(self) -> None:
        """Give up what this holds."""


class LoopBack:
    """The exchange of a single rank: everything comes back as it is."""

    seat = Seat(0, 1)

    def maximum(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)

    def broadcast(self, value: Any, source: int) -> Any:
        return value

    def close(self) -> None:
        pass


class GlooLink:
    """The exchange over a Gloo group of CPU tensors."""

    def __init__(self, group: dist.ProcessGroup, seat: Seat, release: _Release) -> None:
        self.seat = seat
        self._group: dist.ProcessGroup | None = group
        self._release = release

    def maximum(self, values: Sequence[int]) -> tuple[int, ...]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: Sequence[int], op: Any) -> tuple[int, ...]:
        tensor = torch.tensor(values, dtype=torch.int64)
        with _translated_errors():
            dist.all_reduce(tensor, op=op, group=self._open_group())
        return tuple(tensor.tolist())

    def broadcast(self, value: Any, source: int) -> Any:
        group = self._open_group()
        box = [value if self.seat.rank == source else None]
        with _translated_errors():
            dist.broadcast_object_list(
                box,
                src=dist.get_global_rank(group, source),
                group=group,
                device=torch.device("cpu"),
            )
        return box[0]

    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise LinkBroken("the loader was closed")
        return self._group

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            # `destroy_process_group()`, the last line of many scripts, has destroyed this one too.
            with contextlib.suppress(ValueError):
                self._release(group)


class _Release(Protocol):
    def __call__(self, group: dist.ProcessGroup) -> None: ...


class _translated_errors:
    """Turns what Gloo raises into LinkBroken or LinkTimeout."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError):  # c10d's own errors derive from it
            text = str(error)
            kind = LinkTimeout if re.search("timed? ?out", text, re.IGNORECASE) else LinkBroken
            raise kind(text.partition("\n")[0]) from error


def seat_in(choice: GroupChoice) -> Seat:
    """This rank's seat in the group. Raises NotDistributedError if there should be one and is not.

    Never silently alone: without a process group, a job that was started as several ranks gets an
    error, unless the caller asked for `group=None`.
    """
    if choice is None:
        return LoopBack.seat
    if not (dist.is_available() and dist.is_initialized()):
        world = os.environ.get("WORLD_SIZE", "1")
        if choice != "world" or world not in ("", "1"):
            raise NotDistributedError(
                f"WORLD_SIZE is {world}, but there is no process group to align ranks over: call "
                "torch.distributed.init_process_group before iterating, or pass group=None if "
                "this rank is to form batches by itself"
            )
        return LoopBack.seat
    group = dist.group.WORLD if choice == "world" else choice
    rank = dist.get_rank(group)
    if rank < 0:
        raise NotDistributedError("this rank is not a member of the group that it passed")
    return Seat(rank, dist.get_world_size(group))


def connect(choice: GroupChoice, timeout: float) -> Transport:
    """Make the exchange for a loader: a Gloo group of its own, or a loop-back.

    Collective: all ranks of the group must call it, loaders in the same order.
    """
    seat = seat_in(choice)
    if choice is None or not (dist.is_available() and dist.is_initialized()):
        return LoopBack()
    wait = timedelta(seconds=timeout)
    try:
        with _translated_errors():
            if choice == "world" or seat.world_size == dist.get_world_size():
                group = dist.new_group(backend="gloo", timeout=wait, group_desc="odb")
                return GlooLink(group, seat, dist.destroy_process_group)
            return _SUBGROUPS.take(choice, seat, wait)
    except LinkBroken as error:
        raise NotDistributedError(
            f"could not connect the ranks within {timeout:g} s ({error}): every rank of the group "
            "must iterate its loaders, in the same order. For a loader on one rank alone, such as "
            "an evaluation on rank 0, pass group=None"
        ) from error


class _Subgroups:
    """Gloo groups over some of the ranks, reused instead of destroyed.

    PyTorch names a group that only its members create after its ranks and the number of groups
    alive, and never clears the name's entries in its store. A group made after an equal one was
    destroyed finds the old addresses there and hangs (measured: torch 2.13). So these live as long
    as the process, and a later loader over the same ranks takes a free one. Which one, the members
    agree on, as they may have closed their loaders in different orders.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
        self._free: dict[tuple[int, ...], set[int]] = {}

    def take(self, over: dist.ProcessGroup, seat: Seat, timeout: timedelta) -> GlooLink:
        """A group for exactly the ranks of `over`, which no other loader uses."""
        ranks = tuple(dist.get_process_group_ranks(over))
        with self._lock:
            made = self._made.setdefault(ranks, [])
            free = self._free.setdefault(ranks, set())
            offers: list[Any] = [None] * seat.world_size
            dist.all_gather_object(offers, sorted(free), group=over)
            common = set.intersection(*(set(offer) for offer in offers))
            if common:
                number = min(common)
                free.remove(number)
            else:
                number = len(made)
                made.append(
                    dist.new_group(
                        list(ranks),
                        backend="gloo",
                        timeout=timeout,
                        use_local_synchronization=True,
                        group_desc="odb",
                    )
                )

        def release(group: dist.ProcessGroup) -> None:
            with self._lock:
                free.add(number)

        return GlooLink(made[number], seat, release)


_SUBGROUPS = _Subgroups()
