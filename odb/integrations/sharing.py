"""Batches for all members of a data-parallel coordinate, step by step and as one.

Before each step the members exchange a few numbers: where they are, whether one of them failed, and
what was read. So a member that is at another step, or has read other samples, is noticed at that
step by all of them, and an error of one is raised on all. See `odb.integrations.mesh`.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from odb.errors import (
    BatchTypeError,
    ConfigError,
    ExchangeTimeoutError,
    IntegrationError,
    ODBError,
    PeerFailedError,
    PeerLostError,
    PipelineError,
)
from odb.farewell import at_exit
from odb.info import ODBStepInfo, attach_step_info
from odb.integrations.agreement import Header, digest_of, judge
from odb.integrations.base import Facts, facts_of, ranks_of
from odb.loader import ODBDataLoader
from odb.transport import LinkBroken, LinkLost, LinkTimeout, Transport, WatchOptions, connect
from odb.watch.status import Doing, Seen, Status, report

READER = 0
"""The member that reads, if one reads for all."""

Steps = Generator[tuple[Any, ODBStepInfo], None, None]
Build = Callable[[dist.ProcessGroup], ODBDataLoader]


class Coordinate(NamedTuple):
    """See `odb.integrations.mesh.Layout`."""

    group: dist.ProcessGroup
    model_group: dist.ProcessGroup | None
    members: tuple[int, ...]


class Sharing(NamedTuple):
    """one_reads: the first member reads for all; else each does. timeout, warn_after: of the
    exchange between members, in seconds."""

    one_reads: bool
    timeout: float
    warn_after: float | None


class Batch(NamedTuple):
    """A step was read."""

    batch: Any
    info: ODBStepInfo


class Ended(NamedTuple):
    """The epoch is over."""


Outcome = Batch | Ended | BaseException
"""What reading a step came to."""


class SharedLoader:
    """Iterates like an ODBDataLoader, and yields the same batches on all members of a coordinate.

    Made by `Layout.loader` and `Layout.checked`. All members must iterate it equally often, and
    leave an epoch at the same step if they leave it. loader: the one behind it; None on a rank that
    does not read. facts: what it was built with.

    If a member fails, is lost or falls out of step, every member raises a typed error at the same
    step. Ranks in errors of the loader are places in the data-parallel group; in errors of this
    exchange they are ranks of the job.
    """

    def __init__(self, coordinate: Coordinate, build: Build, sharing: Sharing) -> None:
        self._coordinate = coordinate
        self._sharing = sharing
        self._place = coordinate.members.index(dist.get_rank())
        self._reads = not sharing.one_reads or self._place == READER
        self._epoch = 0
        self._runs = 0
        self._running: Callable[[], Steps | None] = lambda: None
        watch = WatchOptions(sharing.warn_after)
        self._link: Transport = connect(coordinate.model_group, sharing.timeout, watch)
        _LINKS.add(self._link)
        at_exit(_say_bye)
        self._finalizer = weakref.finalize(self, self._link.close)
        self._finalizer.atexit = False  # `_say_bye` sees to that
        self.loader: ODBDataLoader | None = None
        try:
            if sharing.one_reads:
                self._check_readers()
            self.facts = self._open(build)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[Any]:
        """An epoch's batches, each with its `ODBStepInfo` inside (see `odb.pop_step_info`)."""
        return (attach_step_info(batch, info) for batch, info in self.steps())

    def steps(self) -> Iterator[tuple[Any, ODBStepInfo]]:
        """An epoch's (batch, info) pairs. Each call starts the next epoch, and ends one that is
        still running."""
        self._stop()
        epoch, self._epoch = self._epoch, self._epoch + 1
        self._runs += 1
        source: Iterator[tuple[Any, ODBStepInfo]] | None = None
        if self.loader is not None:
            self.loader.set_epoch(epoch)
            source = self.loader.steps()
        running = self._run(epoch, source)
        self._running = weakref.ref(running)  # whoever drops it has left the epoch
        return running

    def _stop(self) -> None:
        running = self._running()
        if running is not None:
            running.close()

    def _run(self, epoch: int, source: Iterator[tuple[Any, ODBStepInfo]] | None) -> Steps:
        for step in count():
            self._note(Doing.MAKING, epoch, step)
            own = None if source is None else _read(source)
            outcome = self._agree(epoch, step, own)
            if isinstance(outcome, Ended):
                self._note(Doing.BETWEEN, epoch, step)
                return
            self._note(Doing.HANDING_OVER, epoch, step)
            yield outcome.batch, outcome.info

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration takes. Advances by itself."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration takes; on all members."""
        if epoch < 0:
            raise ConfigError(f"an epoch is a whole number of 0 or more, not {epoch}")
        self._epoch = epoch

    def close(self) -> None:
        """End a running epoch, the loader and the exchange. All members should call it."""
        self._stop()
        if self.loader is not None:
            self.loader.close()
        self._finalizer()

    # ------------------------------------------------------------ agreement

    def _open(self, build: Build) -> Facts:
        """Build the loader, where there is to be one; every member learns how that went."""
        group = self._coordinate.group
        own: Facts | BaseException | None = None
        if self._reads:
            try:
                built = build(group)
                own = facts_of(built)
                _check_ranks(own.ranks, ranks_of(group))
                self.loader = built
            except Exception as error:
                own = error
        with self._translated(0):
            failed = self._exchange(Header(0, 0), own)
            if failed is not None:
                self._raise(own, failed, 0)
            facts: Facts = self._link.broadcast(own, READER)
        return facts._replace(ranks=ranks_of(group))

    def _check_readers(self) -> None:
        """The readers of all coordinates must be one data-parallel group, or they would wait for
        ranks that do not read."""
        link = connect(self._coordinate.group, self._sharing.timeout)
        try:
            with self._translated(0):
                some_read, some_do_not = link.maximum((self._reads, not self._reads))
        finally:
            link.close()
        if some_read and some_do_not:
            raise IntegrationError(
                f"the ranks {ranks_of(self._coordinate.group)} are one data-parallel group, but "
                "some of them are first in their model-parallel group and some are not: the groups "
                "of this layout do not form a grid"
            )

    def _agree(self, epoch: int, step: int, own: Outcome | None) -> Batch | Ended:
        """What all members do in this step. `own`: what this one has read; None if it does not."""
        sent, own = self._packed(own)
        header = Header(epoch, step)
        if isinstance(own, Batch | Ended) and not self._sharing.one_reads:
            digest = None if isinstance(own, Ended) else digest_of(own.batch, own.info)
            header = header._replace(ended=int(isinstance(own, Ended)), digest=digest)
        self._note(Doing.REPORTING, epoch, step)
        with self._translated(step):
            failed = self._exchange(header, own)
            if failed is not None:
                self._raise(own, failed, step)
            if self._sharing.one_reads:
                received = self._link.broadcast(sent, READER)
                own = own if self._reads else pickle.loads(received)
        assert isinstance(own, Batch | Ended)
        return own

    def _packed(self, own: Outcome | None) -> tuple[bytes, Outcome | None]:
        """What is sent, pickled while an error can still be told to the others."""
        alone = len(self._coordinate.members) == 1
        if alone or not self._sharing.one_reads or not isinstance(own, Batch | Ended):
            return b"", own
        try:
            return pickle.dumps(own), own
        except Exception as error:
            refused = BatchTypeError(
                f"this batch cannot be sent to the other members of its coordinate ({error}): make "
                "it of tensors and plain values, or use Layout.checked"
            )
            refused.__cause__ = error
            return b"", refused

    def _exchange(self, header: Header, own: object) -> int | None:
        failed = self._place + 1 if isinstance(own, BaseException) else 0
        return judge(self._link.maximum(header._replace(failed=failed).encode()))

    def _raise(self, own: object, failed: int, step: int) -> NoReturn:
        """Raise this member's own error, or that of the member that failed."""
        rank = self._coordinate.members[failed]
        mine = own if isinstance(own, BaseException) else None
        told = None if mine is None else _for_others(mine, rank, step)
        heard = self._link.broadcast(told, failed)
        raise mine or heard

    @contextmanager
    def _translated(self, step: int) -> Iterator[None]:
        """Errors of the exchange, as users know them."""
        members = self._coordinate.members
        try:
            yield
        except LinkTimeout as error:
            late = [entry._replace(rank=members[entry.rank]) for entry in error.late]
            raise ExchangeTimeoutError(
                step=step,
                timeout=self._sharing.timeout,
                missing=tuple(entry.rank for entry in late),
                report=report(late) if late else "",
            ) from error
        except LinkBroken as error:
            rank = members[error.rank] if isinstance(error, LinkLost) else None
            raise PeerLostError(rank=rank, step=step, reason=str(error)) from error

    def _note(self, doing: Doing, epoch: int, step: int) -> None:
        """For the watch, which tells the others."""
        status = Status(doing, epoch, round=step, step=step, run=self._runs)
        self._link.activity.seen = Seen(status, time.monotonic())


def _read(source: Iterator[tuple[Any, ODBStepInfo]]) -> Outcome:
    """The next step. Whatever goes wrong is an outcome too: the others wait for it."""
    try:
        return Batch(*next(source))
    except StopIteration:
        return Ended()
    except BaseException as error:
        return error


def _for_others(error: BaseException, rank: int, step: int) -> ODBError:
    """What the other members raise when this one raises `error`."""
    if isinstance(error, PipelineError):
        return PeerFailedError(rank=error.rank, step=error.step, reason=error.reason)
    if isinstance(error, ODBError):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            pass
        else:
            return error
    return PeerFailedError(rank=rank, step=step, reason=f"{type(error).__name__}: {error}")


def _check_ranks(ranks: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if ranks != expected:
        raise IntegrationError(
            f"this loader aligns the ranks {ranks}, but the data-parallel group of this layout has "
            f"the ranks {expected}: build the loader with group=layout.group"
        )


_LINKS: weakref.WeakSet[Any] = weakref.WeakSet()


def _say_bye() -> None:
    """A process that ends is not missed by members that end a little later."""
    for link in list(_LINKS):
        link.say_bye()
