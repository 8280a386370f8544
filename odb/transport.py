"""The exchange between ranks. Only this module and `odb.groups` know torch.distributed.

A loader gets a Gloo group of its own, so that its exchanges, which run in the background, can never
be confused with the trainer's collectives or with those of another loader.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from odb.errors import NotDistributedError, ODBError
from odb.groups import ALONE, GroupChoice, OwnGroup, own_group, seat_in
from odb.sharding import Seat
from odb.watch.activity import Activity
from odb.watch.rendezvous import meet
from odb.watch.status import Doing, Late
from odb.watch.verdict import LostRank, Overdue, Verdict
from odb.watch.watcher import Watch

logger = logging.getLogger("odb")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 5e-3
"""How long an exchange waits before it looks whether it is complete: longer each time."""

NAMING_S = 2.0
"""How long a broken exchange waits for the watch to say which rank was lost."""

WAKING_S = 0.5
"""How long a rank whose exchange timed out listens whether others have given it up already."""


class LinkBroken(ODBError):
    """An exchange failed: another rank is gone (or this loader was shut down)."""


class LinkLost(LinkBroken):
    """The process of a rank is gone."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


class LinkTimeout(LinkBroken):
    """An exchange was not complete in time; `late`: the ranks that it waited for, if known."""

    def __init__(self, text: str, late: tuple[Late, ...] = ()) -> None:
        super().__init__(text)
        self.late = late


class Transport(Protocol):
    """What a rank needs of the others. Every rank makes the same calls in the same order."""

    seat: Seat
    activity: Activity
    """Where the driver leaves a note of what it is doing."""

    def maximum(self, values: Sequence[int]) -> tuple[int, ...]:
        """Element-wise maximum over all ranks."""

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        """Element-wise sum over all ranks."""

    def broadcast(self, value: Any, source: int) -> Any:
        """The value that rank `source` passes (what the others pass is ignored)."""

    def check(self) -> None:
        """Raise LinkBroken if the exchange is known to be broken."""

    def listen(self, listener: Callable[[Verdict], None]) -> None:
        """Who is told, in another thread, when the exchange is found to be broken."""

    def say_bye(self) -> None:
        """Tell the others that this process will end: from now on it is not missed."""

    def close(self) -> None:
        """Give up what this holds."""


class LoopBack:
    """The exchange of a single rank: everything comes back as it is."""

    seat = ALONE

    def __init__(self) -> None:
        self.activity = Activity()

    def maximum(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)

    def broadcast(self, value: Any, source: int) -> Any:
        return value

    def check(self) -> None:
        pass

    def listen(self, listener: Callable[[Verdict], None]) -> None:
        pass

    def say_bye(self) -> None:
        pass

    def close(self) -> None:
        pass


class GlooLink:
    """The exchange over a Gloo group of CPU tensors, and the watch over its ranks, if there is one.

    Whether an exchange is complete is looked at now and then, so that it can be left when a rank is
    lost, and because a thread that waits inside of Gloo when Python exits aborts the process
    (measured: torch 2.13). The work that is left behind stays with Gloo, which ends it when the
    other ranks let go of their ends too.
    """

    def __init__(self, own: OwnGroup, seat: Seat) -> None:
        self.seat = seat
        self.activity = Activity()
        self.watch: Watch | None = None
        self._group: dist.ProcessGroup | None = own.group
        self._release = own.release
        self._broken = False

    def maximum(self, values: Sequence[int]) -> tuple[int, ...]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: Sequence[int], op: Any) -> tuple[int, ...]:
        tensor = torch.tensor(values, dtype=torch.int64)
        self._finish(
            lambda group: dist.all_reduce(tensor, op=op, group=group, async_op=True),
        )
        return tuple(tensor.tolist())

    def broadcast(self, value: Any, source: int) -> Any:
        own = self.seat.rank == source
        content = pickle.dumps(value) if own else b""
        size = torch.tensor([len(content)])
        self._send(size, source)
        flat = torch.zeros(int(size), dtype=torch.uint8)
        if own:
            flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._send(flat, source)
        return value if own else pickle.loads(flat.numpy().tobytes())

    def _send(self, tensor: torch.Tensor, source: int) -> None:
        self._finish(
            lambda group: dist.broadcast(
                tensor, src=dist.get_global_rank(group, source), group=group, async_op=True
            )
        )

    def _finish(self, begin: Callable[[dist.ProcessGroup], dist.Work]) -> None:
        """Begin a collective and wait until it is complete, or known never to be."""
        self.check()
        try:
            with _translated_errors():
                group = self._open_group()
                work = begin(group)
                pause = FIRST_PAUSE_S
                while not work.is_completed():
                    if self._verdict is not None:
                        _leave(group, work)
                        self.check()
                    time.sleep(pause)
                    pause = min(pause * 1.25, LONGEST_PAUSE_S)
                work.wait()  # raises what it failed with
        except LinkBroken as error:
            self._broken = True
            named = self._named(error)
            if named is error:
                raise
            raise named from error

    def _named(self, error: LinkBroken) -> LinkBroken:
        """The error with what the watch knows of its cause."""
        if self.watch is None or isinstance(error, LinkLost):
            return error
        if isinstance(error, LinkTimeout):
            # A rank that was frozen wakes up to a timeout of its own making: others know better.
            verdict = self.watch.verdicts.wait(WAKING_S)
            if verdict is None:
                return LinkTimeout(str(error), self.watch.overdue())
            return _broken_by(verdict)
        verdict = self.watch.verdicts.wait(NAMING_S)
        if verdict is not None:
            return _broken_by(verdict)
        closed = [late.rank for late in self.watch.late() if late.status.doing is Doing.CLOSED]
        if closed:
            return LinkLost(closed[0], "it has closed its loader, and does not iterate it again")
        return error

    def start_watch(self, options: WatchOptions) -> None:
        """Begin to watch the other ranks (collective)."""
        group = self._open_group()

        def gather(value: Any) -> list[Any]:
            gathered: list[Any] = [None] * self.seat.world_size
            dist.all_gather_object(gathered, value, group=group)
            return gathered

        place = meet(self.seat.rank, self.seat.world_size, gather)
        self.watch = Watch(place, self.activity, options.warn_after)

    def check(self) -> None:
        if self._verdict is not None:
            self._broken = True
            raise _broken_by(self._verdict)

    @property
    def _verdict(self) -> Verdict | None:
        return None if self.watch is None else self.watch.verdicts.first

    def listen(self, listener: Callable[[Verdict], None]) -> None:
        if self.watch is not None:
            self.watch.verdicts.listen(listener)

    def say_bye(self) -> None:
        if self.watch is not None:
            self.watch.close()

    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise LinkBroken("the loader was closed")
        return self._group

    def close(self) -> None:
        self.say_bye()
        group, self._group = self._group, None
        if group is None:
            return
        # `destroy_process_group()`, the last line of many scripts, has destroyed this one too.
        with contextlib.suppress(ValueError):
            self._release(group, self._broken)


def _leave(group: dist.ProcessGroup, work: dist.Work) -> None:
    """Leave work behind that may not end before the other ranks let go of their ends, too.

    Whoever lets go of a group last waits until its work has ended (measured: torch 2.13). That
    should be neither the trainer nor whatever cleans up when Python exits. So a thread keeps both,
    and looks now and then: in `work.wait()`, Python's exit would end it with an abort.
    """

    def outlast(group: dist.ProcessGroup, work: dist.Work) -> None:
        while not work.is_completed():
            time.sleep(0.2)

    threading.Thread(target=outlast, args=(group, work), name="odb-abandoned", daemon=True).start()


def _broken_by(verdict: Verdict) -> LinkBroken:
    match verdict:
        case LostRank(rank, reason):
            return LinkLost(rank, reason)
        case Overdue(late):
            return LinkTimeout("another rank has given up waiting", late)


class _translated_errors:
    """Turns what Gloo raises into LinkBroken or LinkTimeout."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError):  # c10d's own errors derive from it
            text = str(error)
            kind = LinkTimeout if re.search("timed? ?out", text, re.IGNORECASE) else LinkBroken
            raise kind(text.partition("\n")[0]) from error


@dataclass(frozen=True)
class WatchOptions:
    """warn_after: seconds of waiting after which late ranks are named in a warning, or None."""

    warn_after: float | None


def connect(choice: GroupChoice, timeout: float, watch: WatchOptions | None = None) -> Transport:
    """Make the exchange for a loader: a Gloo group of its own, or a loop-back. With `watch`, its
    ranks watch each other.

    Collective: all ranks of the group must call it, loaders in the same order.
    """
    seat = seat_in(choice)
    if choice is None or not (dist.is_available() and dist.is_initialized()):
        return LoopBack()
    try:
        with _translated_errors():
            link = GlooLink(own_group(choice, seat, timeout), seat)
            if watch is not None and seat.world_size > 1:
                link.start_watch(watch)
            return link
    except LinkBroken as error:
        raise NotDistributedError(
            f"could not connect the ranks within {timeout:g} s ({error}): every rank of the group "
            "must iterate its loaders, in the same order. For a loader on one rank alone, such as "
            "an evaluation on rank 0, pass group=None"
        ) from error
