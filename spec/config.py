"""Everything that all ranks must agree on, checked once, where it is made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from spec.errors import ConfigError

PROTOCOL_VERSION = 2
MOST_DOUBLINGS = 62
"""After so many rounds of slow start, any window that fits the wire is reached."""

WIRE_LIMIT = 2**62
"""Numbers that cross ranks travel as signed 64-bit integers, some of them negated."""


class CostRule(IntEnum):
    """How the costs of a group's samples add up to the cost of the batch."""

    PADDED = 1
    """Longest times count: every row is padded to the longest."""
    SUMMED = 2
    """The sum: rows are packed one behind another without padding."""


class Mode(IntEnum):
    """When an epoch ends."""

    JOIN = 1
    """When every rank has delivered everything: no sample is left out."""
    QUOTA = 2
    """On all ranks at the same step: the first at which the global quota of samples is met, or,
    without a quota, the last before some rank would have nothing to deliver."""


class Idle(IntEnum):
    """What a drained rank does while others still have samples."""

    PAD = 1
    """It yields idle steps: a real, tiny, already seen batch whose loss scale is 0."""
    STOP = 2
    """Its iteration ends early, for trainers that run under DDP's `Join`."""


@dataclass(frozen=True)
class Budget:
    """What one batch may cost.

    tokens: most tokens of a batch of two or more samples; a longer sample travels alone.
    rule: how costs add up (padded or summed).
    max_samples: most samples of a batch, or None.
    extras: budgets of further per-sample costs, in the order of `Sample.extras`; these add up.
    multiple: a padded batch is as long as its longest sample rounded up to this.
    """

    tokens: int
    rule: CostRule = CostRule.PADDED
    max_samples: int | None = None
    extras: tuple[int, ...] = ()
    multiple: int = 1

    def __post_init__(self) -> None:
        _positive("token budget", self.tokens)
        _positive("pad_to_multiple_of", self.multiple)
        if self.max_samples is not None:
            _positive("max_samples", self.max_samples)
        for limit in self.extras:
            _positive("the budget of a resource", limit)


@dataclass(frozen=True)
class Config:
    """One epoch's settings, the same on every rank.

    window: most samples that a rank holds while it forms groups. Larger windows hold more samples
        of similar length, so batches have less padding.
    slow_start: the first round waits for this many samples only, each later one for twice as many
        as the one before, up to the window, so that the first batch comes fast.
    quota: for `Mode.QUOTA`, the number of samples (of all ranks together) that ends the epoch.
    seed: of the shared draw that orders the steps of a round.
    accumulation_steps: the steps of a block, over which gradients are added up.
    settings: a digest of what else the shell wants to be equal on every rank.
    """

    budget: Budget
    window: int = 1024
    slow_start: int = 64
    mode: Mode = Mode.JOIN
    idle: Idle = Idle.PAD
    quota: int | None = None
    seed: int = 0
    settings: int = 0
    accumulation_steps: int = 1

    def __post_init__(self) -> None:
        _positive("window", self.window)
        _positive("slow_start", self.slow_start)
        _positive("accumulation_steps", self.accumulation_steps)
        if not 0 <= self.seed < WIRE_LIMIT:
            raise ConfigError(f"seed must be in 0..2**62-1, not {self.seed}")
        if not 0 <= self.settings < WIRE_LIMIT:
            raise ConfigError(f"settings must be in 0..2**62-1, not {self.settings}")
        if self.quota is not None:
            _positive("quota", self.quota)
            if self.mode is not Mode.QUOTA:
                raise ConfigError("a quota needs quota mode: pass join=False with it")
        if self.mode is Mode.QUOTA and self.idle is Idle.STOP:
            raise ConfigError(
                'idle="stop" lets ranks end at different steps, which quota mode promises not to: '
                'use idle="pad" with join=False'
            )
        if self.accumulation_steps > 1 and self.idle is Idle.STOP:
            raise ConfigError(
                f'accumulation_steps={self.accumulation_steps} and idle="stop" exclude each other: '
                "a rank that leaves in the middle of a block takes along gradients that no step of "
                'the optimizer has seen: use idle="pad"'
            )


class Terms(NamedTuple):
    """What ranks must have in common before they may decide anything together.

    The first four say where a rank is, the others how it is configured. Two ranks that differ in
    any of them get a `Mismatch` that names the term and both values. 0 stands for "no limit".
    """

    version: int
    epoch: int
    round: int
    step: int
    token_budget: int
    cost_rule: int
    max_samples: int
    pad_to_multiple_of: int
    window: int
    slow_start: int
    mode: int
    idle: int
    quota: int
    seed: int
    settings: int
    accumulation_steps: int


class Place(NamedTuple):
    """Where in training a rank is: the next step's number counts from the epoch's start."""

    epoch: int
    round: int
    step: int


def terms_of(config: Config, place: Place) -> Terms:
    """The terms that a rank with this configuration, at this place, posts."""
    budget = config.budget
    return Terms(
        version=PROTOCOL_VERSION,
        epoch=place.epoch,
        round=place.round,
        step=place.step,
        token_budget=budget.tokens,
        cost_rule=int(budget.rule),
        max_samples=budget.max_samples or 0,
        pad_to_multiple_of=budget.multiple,
        window=config.window,
        slow_start=config.slow_start,
        mode=int(config.mode),
        idle=int(config.idle),
        quota=config.quota or 0,
        seed=config.seed,
        settings=config.settings,
        accumulation_steps=config.accumulation_steps,
    )


def fill_target(config: Config, round_: int) -> int:
    """How many samples a rank gathers before it reports: slow start, then the window."""
    return min(config.window, config.slow_start << min(round_, MOST_DOUBLINGS))


def _positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < WIRE_LIMIT:
        raise ConfigError(f"{name} must be a whole number from 1 to 2**62-1, not {value!r}")
