"""Every error of the loader. All derive from `ODBError` and say what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spec.errors import ConfigError, EnvelopeError, IllegalEventError, ODBError

__all__ = [
    "BatchError",
    "BatchTypeError",
    "ConfigError",
    "CostError",
    "EnvelopeError",
    "ExchangeTimeoutError",
    "IllegalEventError",
    "IntegrationError",
    "MismatchError",
    "MissingDependencyError",
    "NotDistributedError",
    "ODBError",
    "PeerFailedError",
    "PeerLostError",
    "PipelineError",
    "SampleError",
    "TooManySkippedError",
    "WorkerLostError",
]


class CostError(ODBError, ValueError):
    """A sample's cost or loss weight cannot be found, or is not a whole number of 0 or more."""


class BatchTypeError(ODBError, TypeError):
    """A batch has no place for its step's `ODBStepInfo`; iterate `loader.steps()` instead."""


class NotDistributedError(ODBError):
    """Several ranks were started, but there is no process group to align them over."""


class IntegrationError(ConfigError):
    """A framework is set so that training with odb would be wrong, or hang; the message names the
    switch and the value that it needs."""


class MissingDependencyError(ODBError, ImportError):
    """An optional package is needed for this; the message names the extra to install."""


class _FromFacts(ODBError):
    """An error that is made from keyword arguments; it crosses processes by them."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self._facts = facts

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._facts)


def _rebuild(kind: type[_FromFacts], facts: dict[str, Any]) -> _FromFacts:
    return kind(**facts)


class PipelineError(_FromFacts):
    """This rank's pipeline failed: the cause is chained, `rank` and `step` say where.

    `step` is the first step of the epoch that no rank has taken. `lost` names the samples that
    were in this rank's hands, in no batch that was delivered.
    """

    def __init__(self, *, rank: int, step: int, reason: str, lost: tuple[object, ...] = ()) -> None:
        names = ", ".join(map(repr, lost[:10])) + (", ..." if len(lost) > 10 else "")
        super().__init__(
            f"this rank ({rank}) failed, so all ranks stop before step {step}: {reason}. "
            f"{len(lost)} samples had been read and were in no step"
            + (f": {names}" if lost else ""),
            rank=rank,
            step=step,
            reason=reason,
            lost=lost,
        )
        self.rank = rank
        self.step = step
        self.reason = reason
        self.lost = lost


class BatchError(ODBError):
    """The collate function failed; `sample_ids` are those of the batch (none: an idle step's). The
    original error is chained."""

    def __init__(self, sample_ids: Sequence[object], error: BaseException) -> None:
        names = ", ".join(map(repr, sample_ids)) or "none (an idle step)"
        summary = f"{type(error).__name__}: {error}"
        super().__init__(f"making a batch of the samples {names} failed: {summary}")
        self.sample_ids = tuple(sample_ids)
        self._cause = error

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchError, (self.sample_ids, self._cause)


class SampleError(ODBError):
    """Reading or measuring one sample failed. The original error is in the message, with its
    traceback, as it may come from another process."""

    def __init__(self, sample_id: object, worker: int | None, summary: str, details: str) -> None:
        where = "in the main process" if worker is None else f"in worker {worker}"
        super().__init__(f"sample {sample_id!r} failed {where}: {summary}\n\n{details}")
        self.sample_id = sample_id
        self.worker = worker
        self.summary = summary
        self._details = details

    def __reduce__(self) -> tuple[type[SampleError], tuple[object, ...]]:
        return SampleError, (self.sample_id, self.worker, self.summary, self._details)


class PeerFailedError(_FromFacts):
    """Another rank's pipeline failed; this rank stops at the same step with all others."""

    def __init__(self, *, rank: int, step: int, reason: str) -> None:
        super().__init__(
            f"rank {rank} failed, so all ranks stop before step {step}. It says: {reason}",
            rank=rank,
            step=step,
            reason=reason,
        )
        self.rank = rank
        self.step = step
        self.reason = reason


class PeerLostError(_FromFacts):
    """The process of another rank is gone: `rank`, or None if it is not known which. `step` is the
    next step that this rank's trainer would have taken."""

    def __init__(self, *, rank: int | None, step: int, reason: str) -> None:
        who = "another rank" if rank is None else f"rank {rank}"
        where = "the logs of the ranks for the first that ended" if rank is None else "its log"
        super().__init__(
            f"lost {who} before step {step}: {reason}. Look at {where}; the job has to be started "
            "again",
            rank=rank,
            step=step,
            reason=reason,
        )
        self.rank = rank
        self.step = step
        self.reason = reason

    def before(self, step: int) -> PeerLostError:
        """The same, noticed before another step."""
        return PeerLostError(rank=self.rank, step=step, reason=self.reason)


class ExchangeTimeoutError(_FromFacts, TimeoutError):
    """Some ranks did not take part in an exchange within the loader's `timeout`. `missing` names
    them, and `report` says what they did; both are empty if that is not known."""

    def __init__(
        self, *, step: int, timeout: float, missing: tuple[int, ...] = (), report: str = ""
    ) -> None:
        who = f"it waits for {report}" if report else "some rank is stuck"
        super().__init__(
            f"the exchange before step {step} was not complete after {timeout:g} s: {who}. If a "
            "rank is only slow, a longer `timeout` helps; one that is in no epoch, or has closed "
            "its loader, iterates it less often than the others",
            step=step,
            timeout=timeout,
            missing=missing,
            report=report,
        )
        self.step = step
        self.timeout = timeout
        self.missing = missing
        self.report = report


class TooManySkippedError(_FromFacts):
    """More samples failed on this rank in an epoch than `max_skipped`; the last one's error is
    chained."""

    def __init__(self, *, skipped: int, sample: object) -> None:
        super().__init__(
            f"sample {sample!r} failed after {skipped} others in this epoch, which is all that "
            "max_skipped allows: look at stats.filtered for what is wrong with them",
            skipped=skipped,
            sample=sample,
        )
        self.skipped = skipped
        self.sample = sample


class WorkerLostError(_FromFacts):
    """A worker process of the DataLoader ended by itself: `worker` is its number, if that is known,
    `signal` the name of the signal that killed it, if one did."""

    def __init__(
        self, *, worker: int | None, pid: int | None, signal: str | None, exit_code: int | None
    ) -> None:
        name = "a worker" if worker is None else f"worker {worker}"
        process = "" if pid is None else f" (pid {pid})"
        how = "ended by itself" if exit_code is None else f"ended with exit code {exit_code}"
        if signal is not None:
            how = f"was killed by {signal}"
        hint = ": the system may have run out of memory" if signal == "SIGKILL" else ""
        super().__init__(
            f"{name}{process} of the DataLoader {how}{hint}. Look at the system log, try fewer "
            "workers, or run with num_workers=0 to see what fails",
            worker=worker,
            pid=pid,
            signal=signal,
            exit_code=exit_code,
        )
        self.worker = worker
        self.pid = pid
        self.signal = signal
        self.exit_code = exit_code


TERM_NAMES = {
    "settings": "shuffle, loss_scaling, on_error, sharded or resources (compared by a digest)"
}
"""Terms that need explaining."""


class MismatchError(_FromFacts):
    """Ranks are configured differently or are at different places: names the term and both
    values."""

    def __init__(self, *, term: str, low: int, high: int) -> None:
        super().__init__(
            f"ranks disagree on {TERM_NAMES.get(term, term)}: one has {low}, another {high}. All "
            "ranks must build the loader with the same settings and iterate it equally often",
            term=term,
            low=low,
            high=high,
        )
        self.term = term
        self.low = low
        self.high = high
