"""What a loader counts during an epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from odb.info import SampleId


class FilteredSample(NamedTuple):
    """A sample that was not trained on, and why."""

    sample_id: SampleId
    reason: str


@dataclass
class LoaderStats:
    """This rank's counts for one epoch; `loader.stats` is the current or the last one's.

    steps, idle_steps: batches handed to the output queue, and how many of these were idle.
    rounds: rounds that led to steps. samples, tokens: delivered in these steps.
    padded_tokens: what the batches take in memory; 1 - tokens / padded_tokens is the padding.
    filtered: samples without content, tokens or loss weight, and with on_error="skip" those that
        failed. oversize: samples that alone exceed a budget, each delivered alone.
    undelivered: samples that had been read when the epoch ended early (a met quota, a trainer
        that stopped, a failure) and were in no step.
    closed_by: the rank whose trainer stopped early and so ended the epoch for all, if any.
    """

    epoch: int
    steps: int = 0
    idle_steps: int = 0
    rounds: int = 0
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    filtered: list[FilteredSample] = field(default_factory=list)
    oversize: list[SampleId] = field(default_factory=list)
    undelivered: list[SampleId] = field(default_factory=list)
    closed_by: int | None = None
    complete: bool = False

    @property
    def padding(self) -> float:
        """The share of padding in this rank's batches, from 0 to 1."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0
