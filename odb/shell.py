"""The loader's side of the commands: samples come from a stream, steps go to the outbox."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from odb.batches import BatchMaker, Delivery, Spare
from odb.errors import BatchError, PeerLostError, SampleError, TooManySkippedError
from odb.faults import FaultLog
from odb.info import SampleId
from odb.outbox import Outbox
from odb.source import Entry, Stream
from odb.stats import FilteredSample, LoaderStats
from odb.transport import LinkBroken, Transport
from spec.config import Budget
from spec.grouping import batch_cost, load_of_group, oversize
from spec.messages import AbortedBy, ClosedBy, Finished, Outcome, Step
from spec.rank import RankState, Trainer, held
from spec.samples import Sample

logger = logging.getLogger("odb")


@dataclass
class Ports:
    """What the shell of one epoch works with."""

    stream: Stream
    transport: Transport
    outbox: Outbox[Delivery]
    batches: BatchMaker
    stats: LoaderStats


@dataclass(frozen=True)
class ShellOptions:
    """skip_failed: list samples that fail instead of failing with them, up to `most_skipped` of
    them. timeout: seconds, only for the message when an exchange has timed out."""

    budget: Budget
    skip_failed: bool
    timeout: float
    most_skipped: int | None = None


class LoaderShell:
    """Performs the commands of one rank for one epoch (see `odb.interpreter.Shell`)."""

    def __init__(self, ports: Ports, options: ShellOptions) -> None:
        self._ports = ports
        self._options = options
        self._contents: dict[int, Entry] = {}
        self._waiting: list[Entry] = []
        self._spare: Spare | None = None
        self._faults = FaultLog(ports.transport, options.timeout)
        self._last_round = -1
        self._skipped = 0

    # ------------------------------------------------------------ samples in

    def pull(self, first_seq: int, limit: int) -> tuple[Sample, ...] | None:
        self._ports.transport.check()
        if self._ports.outbox.closed:
            return None
        entries = (self._waiting or self._ports.stream.pull(limit))[:limit]
        self._waiting = self._waiting[limit:]
        for i, entry in enumerate(entries):
            if entry.error is not None and not self._may_skip():
                if i == 0:
                    raise self._failure(entry.error)
                # What arrived before the failure goes first; the failure is the next pull's.
                self._waiting = entries[i:] + self._waiting
                entries = entries[:i]
                break
        samples = []
        for seq, entry in enumerate(entries, start=first_seq):
            self._contents[seq] = entry
            samples.append(Sample(seq, *entry.measured))
        return tuple(samples)

    def _may_skip(self) -> bool:
        """Whether one more sample that failed is let go of; counts it then."""
        most = self._options.most_skipped
        if not self._options.skip_failed or (most is not None and self._skipped >= most):
            return False
        self._skipped += 1
        return True

    def _failure(self, error: SampleError) -> Exception:
        if not self._options.skip_failed:
            return error
        failure = TooManySkippedError(skipped=self._skipped, sample=error.sample_id)
        failure.__cause__ = error
        return failure

    def filter(self, sample: Sample) -> None:
        entry = self._contents.pop(sample.seq)
        if entry.error is not None:
            reason = f"failed: {entry.error.summary}"
        elif entry.sample is None:
            reason = "the dataset returned None"
        else:
            reason = "cost 0" if sample.cost == 0 else "loss weight 0"
        self._ports.stats.filtered.append(FilteredSample(entry.sample_id, reason))

    def keep_spare(self, sample: Sample) -> None:
        self._spare = Spare.of(self._contents[sample.seq].sample)

    def share_spare(self, donor: int) -> None:
        packed = None if self._spare is None else self._spare.packed
        packed = self._ports.transport.broadcast(packed, donor)
        if self._spare is None:
            self._spare = Spare(packed)

    def sample_ids(self, seqs: Sequence[int]) -> list[SampleId]:
        """What the dataset calls samples that are still held."""
        return [self._contents[seq].sample_id for seq in seqs]

    # ------------------------------------------------------------ steps out

    def emit(self, step: Step) -> bool:
        entries = [self._contents[sample.seq] for sample in step.group]
        samples: list[Any] = [entry.sample for entry in entries]
        if step.idle:
            assert self._spare is not None, "the protocol promised a spare"
            samples = [self._spare.sample()]
        ids = [entry.sample_id for entry in entries]
        try:
            delivery = self._ports.batches.make(step, ids, samples)
        except Exception as error:
            raise BatchError(ids, error) from error
        self._ports.transport.activity.hand_over()
        if not self._ports.outbox.put(delivery):
            self._ports.transport.check()
            return False
        self._count(step)
        for sample in step.group:
            del self._contents[sample.seq]
        return True

    def _count(self, step: Step) -> None:
        stats, budget = self._ports.stats, self._options.budget
        stats.steps += 1
        stats.rounds += step.round != self._last_round
        self._last_round = step.round
        if step.idle:
            stats.idle_steps += 1
            return
        stats.samples += step.local.samples
        stats.tokens += step.local.tokens
        stats.padded_tokens += batch_cost(budget, load_of_group(step.group))
        if len(step.group) == 1 and oversize(budget, step.group[0]):
            stats.oversize.append(self._contents[step.group[0].seq].sample_id)

    def drop(self, deliveries: list[Delivery]) -> None:
        """Steps that were handed over will not be taken."""
        for delivery in deliveries:
            self._ports.stats.undelivered.extend(delivery.info.sample_ids)

    def retire(self) -> None:
        self._ports.stats.complete = True
        self._ports.outbox.finish()

    # ------------------------------------------------------------ the end

    def failed(self, error: BaseException) -> None:
        self._faults.failed(error)

    def lost(self, error: LinkBroken) -> None:
        self._faults.lost(error)

    def share_reason(self, rank: int) -> None:
        self._faults.share_reason(rank)

    def give_up(self, state: RankState) -> None:
        own = AbortedBy(self._ports.transport.seat.rank)
        error = self._faults.explain(own, state.place.step, self._undelivered(state))
        self._ports.outbox.finish(error)

    def _undelivered(self, state: RankState) -> list[SampleId]:
        return [self._contents[sample.seq].sample_id for sample in held(state)]

    def end(self, outcome: Outcome, state: RankState) -> None:
        stats = self._ports.stats
        undelivered = self._undelivered(state)
        stats.undelivered.extend(undelivered)
        stats.complete = stats.complete or isinstance(outcome, Finished)
        if isinstance(outcome, ClosedBy):
            stats.closed_by = outcome.rank
            if not self._ports.outbox.closed:
                logger.warning(
                    "odb: the trainer of rank %d stopped early, so the epoch ends before step %d",
                    outcome.rank,
                    state.place.step,
                )
        error = self._faults.explain(outcome, state.place.step, undelivered)
        if error is None:
            self.release()  # behind the epoch nothing is left of it
        if isinstance(error, PeerLostError):
            self.drop(self._ports.outbox.fail(error.before))
        in_time = self._ports.outbox.finish(error)
        self.release()  # which may take seconds while workers start: an error does not wait for it
        if error is not None and not in_time and state.trainer is Trainer.RETIRED:
            logger.error("odb: an epoch that this rank had left (idle stop) failed: %s", error)

    def crashed(self, error: BaseException) -> None:
        """An error that is no event of the protocol (a defect of odb) reaches the trainer too."""
        self.release()
        if not self._ports.outbox.finish(error):
            logger.error("odb: the driver of an epoch that the trainer had left failed: %r", error)

    def release(self) -> None:
        """Let go of the samples and of the workers that read them."""
        self._ports.stream.close()
        self._contents.clear()
        self._waiting.clear()
