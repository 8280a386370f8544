"""The numbers of a way, put together from the records of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from odb.demo.accounting import Accounting, account
from odb.demo.records import RankRecord, StepRecord, Way


class CurvePoint(NamedTuple):
    """The validation loss after so many seconds, and real tokens of all ranks together."""

    seconds: float
    tokens: int
    loss: float


@dataclass(frozen=True)
class WayResult:
    """One way, all ranks together. Seconds are wall time without validation."""

    way: Way
    ranks: tuple[RankRecord, ...]
    accounting: Accounting
    curve: tuple[CurvePoint, ...]
    updates: int

    @property
    def seconds(self) -> float:
        """From the start of the way until the last rank was done."""
        return max(record.seconds for record in self.ranks)

    @property
    def all_steps(self) -> Iterator[StepRecord]:
        """The steps of every rank."""
        return (step for record in self.ranks for step in record.steps)

    @property
    def steps_per_rank(self) -> tuple[int, ...]:
        """How many steps each rank took."""
        return tuple(len(record.steps) for record in self.ranks)

    @property
    def steps_equal(self) -> bool:
        """Whether all ranks took the same steps of the same epochs."""
        numbers = {tuple((s.epoch, s.number) for s in record.steps) for record in self.ranks}
        return len(numbers) == 1

    @property
    def tokens(self) -> int:
        """Real tokens of all ranks."""
        return sum(step.tokens for step in self.all_steps)

    @property
    def padding(self) -> float:
        """The share of padding in all batches of all ranks, from 0 to 1."""
        return 1 - self.tokens / sum(step.padded for step in self.all_steps)

    @property
    def samples_per_second(self) -> float:
        """Different samples, so one that comes twice counts once."""
        return self.accounting.delivered / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of all ranks."""
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Mean of the real tokens of a step, all ranks together."""
        return self.tokens / max(self.steps_per_rank)

    @property
    def loss(self) -> float:
        """The validation loss at the end: mean over the tokens of the held-out samples."""
        return self.curve[-1].loss

    def loss_at(self, seconds: float) -> float:
        """The validation loss at a moment, on the line between the two checkpoints around it."""
        before = self.curve[0]
        for point in self.curve:
            if point.seconds >= seconds:
                span = point.seconds - before.seconds
                share = (seconds - before.seconds) / span if span else 1.0
                return before.loss + share * (point.loss - before.loss)
            before = point
        return before.loss

    def budget_filled(self, budget: int) -> float:
        """How much of the budget a batch takes in the mean, padding included."""
        sizes = [step.padded for step in self.all_steps]
        return sum(sizes) / (len(sizes) * budget)

    def over_budget(self, budget: int) -> int:
        """Batches of two or more samples that take more tokens than the budget."""
        return sum(step.rows > 1 and step.padded > budget for step in self.all_steps)

    def as_json(self) -> dict[str, Any]:
        """The numbers of the table, and the curves of the plot."""
        return {
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "padding": self.padding,
            "steps": max(self.steps_per_rank),
            "steps_per_rank": list(self.steps_per_rank),
            "steps_equal": self.steps_equal,
            "updates": self.updates,
            "tokens_per_step": self.tokens_per_step,
            "validation_loss": self.loss,
            "samples_exactly_once": self.accounting.exactly_once,
            "samples_missing": len(self.accounting.missing),
            "samples_repeated": len(self.accounting.repeated),
            "samples_unknown": len(self.accounting.unknown),
            "measuring_seconds": max(record.measuring for record in self.ranks),
            "waiting_for_batches": self._waiting,
            "curve": [point._asdict() for point in self.curve],
            "padding_per_step": list(self.padding_per_step()),
        }

    def padding_per_step(self) -> Iterator[float]:
        """The share of padding in each step, all ranks together."""
        for steps in zip(*(record.steps for record in self.ranks), strict=False):
            yield 1 - sum(s.tokens for s in steps) / sum(s.padded for s in steps)

    @property
    def _waiting(self) -> float:
        waited = sum(step.waited for step in self.all_steps)
        return waited / (self.seconds * len(self.ranks))


def merge(records: Sequence[RankRecord], samples: int, epochs: int) -> WayResult:
    """The result of a way from the records of all its ranks."""
    delivered = (
        (step.epoch, sample)
        for record in records
        for step in record.steps
        for sample in step.sample_ids
    )
    curve = []
    for parts in zip(*(record.checkpoints for record in records), strict=True):
        weight = sum(part.weight for part in parts)
        curve.append(
            CurvePoint(
                max(part.seconds for part in parts),
                sum(part.tokens for part in parts),
                sum(part.loss_sum for part in parts) / weight,
            )
        )
    return WayResult(
        way=records[0].way,
        ranks=tuple(records),
        accounting=account(samples, epochs, delivered),
        curve=tuple(curve),
        updates=sum(step.update for step in records[0].steps),
    )
