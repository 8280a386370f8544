"""When an epoch has delivered enough: at the first step at which the global quota is met."""

from __future__ import annotations

from functools import partial, reduce
from typing import NamedTuple

from spec.config import Config
from spec.samples import Counts


class Progress(NamedTuple):
    """How far into a round: the steps that are taken, and the samples that all ranks together have
    delivered with them since the epoch's start."""

    steps: int
    delivered: int


def quota_met(config: Config, delivered: int) -> bool:
    """Whether all ranks together have delivered the samples that were asked for."""
    return config.quota is not None and delivered >= config.quota


def advance(config: Config, progress: Progress, total: Counts) -> Progress:
    """After one more step of a round: it is taken, unless the quota was met before it."""
    if quota_met(config, progress.delivered):
        return progress
    return Progress(progress.steps + 1, progress.delivered + total.samples)


def take_steps(config: Config, delivered: int, totals: tuple[Counts, ...]) -> Progress:
    """Which steps of a round are taken: all, or up to the one at which the global quota is met
    (promise: quota-closure)."""
    return reduce(partial(advance, config), totals, Progress(0, delivered))
