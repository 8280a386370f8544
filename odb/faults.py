"""What went wrong on this rank or on another, and the error that the user gets for it."""

from __future__ import annotations

from collections.abc import Sequence

from odb.errors import (
    BatchError,
    ExchangeTimeoutError,
    MismatchError,
    ODBError,
    PeerFailedError,
    PeerLostError,
    PipelineError,
    SampleError,
    TooManySkippedError,
    WorkerLostError,
)
from odb.info import SampleId
from odb.transport import LinkBroken, LinkTimeout, Transport
from odb.watch.status import Late, report
from spec.messages import AbortedBy, Lost, Mismatched, Outcome


class FaultLog:
    """Remembers faults as they come up during an epoch, to explain its outcome afterwards."""

    def __init__(self, transport: Transport, timeout: float) -> None:
        self._transport = transport
        self._timeout = timeout
        self._error: BaseException | None = None
        self._broken: LinkBroken | None = None
        self._reason = ""

    def failed(self, error: BaseException) -> None:
        """This rank's pipeline raised."""
        self._error = error

    def lost(self, error: LinkBroken) -> None:
        """An exchange broke."""
        self._broken = error

    def share_reason(self, rank: int) -> None:
        """Tell all why this rank failed, or hear it from `rank`."""
        own = "" if self._error is None else _summary(self._error)
        try:
            self._reason = self._transport.broadcast(own, rank)
        except LinkBroken:
            self._reason = "(it ended before it could say why)"

    def explain(self, outcome: Outcome, step: int, lost: Sequence[SampleId]) -> ODBError | None:
        """The error for an outcome, None for a good one. `lost`: read and in no step."""
        match outcome:
            case AbortedBy(rank) if rank == self._transport.seat.rank:
                return self._own_failure(rank, step, lost)
            case AbortedBy(rank):
                return PeerFailedError(rank=rank, step=step, reason=self._reason)
            case Mismatched(term, low, high):
                return MismatchError(term=term, low=low, high=high)
            case Lost(_) if isinstance(self._broken, LinkTimeout):
                return timed_out(step, self._timeout, self._broken.late)
            case Lost(lost_rank):
                return PeerLostError(rank=lost_rank, step=step, reason=str(self._broken))
            case _:
                return None

    def _own_failure(self, rank: int, step: int, lost: Sequence[SampleId]) -> PipelineError:
        assert self._error is not None
        failure = PipelineError(
            rank=rank, step=step, reason=_summary(self._error), lost=tuple(lost)
        )
        failure.__cause__ = self._error
        return failure


def timed_out(step: int, timeout: float, late: Sequence[Late]) -> ExchangeTimeoutError:
    """The error for an exchange that was not complete in time, because of these ranks."""
    missing = tuple(entry.rank for entry in late)
    text = report(late) if late else ""
    return ExchangeTimeoutError(step=step, timeout=timeout, missing=missing, report=text)


def _summary(error: BaseException) -> str:
    if isinstance(error, SampleError):
        return f"sample {error.sample_id!r}: {error.summary}"
    if isinstance(error, BatchError | TooManySkippedError | WorkerLostError):
        return str(error)
    return f"{type(error).__name__}: {error}"
