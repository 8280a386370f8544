"""Runs an epoch on lengths alone and sums up what it costs: padding, steps, waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, zip_longest
from typing import Any, NamedTuple, overload

from odb.errors import ConfigError
from odb.planning.lengths import Lengths
from odb.sharding import Seat, ShardSampler
from spec.config import Budget, Config, CostRule, Mode
from spec.grouping import batch_cost, load_of_group, oversize, padded_length
from spec.lockstep import EpochRecord, run_epoch
from spec.samples import Group, Sample, trainable

Progress = Callable[[int], None]
"""Is told how many samples have been read since the last call."""


@dataclass(frozen=True)
class Scenario:
    """The loader's settings that a plan depends on, by the names of `ODBDataLoader`'s arguments,
    and the number of ranks."""

    world_size: int = 1
    window: int = 1024
    packed: bool = False
    max_samples: int | None = None
    pad_to_multiple_of: int = 1
    join: bool = True
    quota: int | None = None
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"world size must be 1 or more, not {self.world_size}")

    def config(self, budget: int) -> Config:
        """The protocol's configuration with this budget. Raises ConfigError."""
        return Config(
            budget=Budget(
                tokens=budget,
                rule=CostRule.SUMMED if self.packed else CostRule.PADDED,
                max_samples=self.max_samples,
                multiple=self.pad_to_multiple_of,
            ),
            window=self.window,
            mode=Mode.JOIN if self.join else Mode.QUOTA,
            quota=self.quota,
            seed=self.seed,
        )


class Simulation(NamedTuple):
    """An epoch as the ranks run it. `indices`: by rank and arrival number, a sample's index."""

    record: EpochRecord
    indices: list[list[int]]

    def sample_ids(self, rank: int) -> list[tuple[int, ...]]:
        """The dataset indices in each step of a rank, as `ODBStepInfo.sample_ids` has them."""
        own = self.indices[rank]
        return [tuple(own[s.seq] for s in step.group) for step in self.record.ranks[rank].steps]


@dataclass(frozen=True)
class Forecast:
    """What an epoch with one budget (or with one fixed batch size) comes to.

    batching: "odb", or "fixed N". rounds: exchanges that led to steps (0 for fixed batches).
    padding: share of the padded tokens that are padding. mean_batch, max_batch: samples of a batch.
    largest_batch_tokens: the largest padded batch, which decides the memory that is needed.
    tokens_per_step: padded tokens of a rank in a step, on average, idle steps included.
    efficiency: real tokens / (sum over steps of world size times the step's largest padded batch):
        the share of the ranks' time that is spent on real tokens if time goes with padded tokens
        and all wait for the slowest.
    idle: share of the steps in which a rank has no sample. oversize: samples that exceed the
        budget by themselves. filtered: samples without tokens or loss weight. undelivered: samples
        left when the epoch ended, in quota mode.
    """

    budget: int
    batching: str
    steps: int
    rounds: int
    samples: int
    tokens: int
    padded_tokens: int
    padding: float
    mean_batch: float
    max_batch: int
    largest_batch_tokens: int
    tokens_per_step: float
    efficiency: float
    idle: float
    oversize: int
    filtered: int
    undelivered: int

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def simulate(
    lengths: Lengths, scenario: Scenario, budget: int, progress: Progress | None = None
) -> Simulation:
    """Run epoch 0 on all ranks, with the samples that `ODBDataLoader` would give to each."""
    config = scenario.config(budget)
    indices = _shares(lengths, scenario)
    shards: list[Sequence[Sample]] = [_samples(lengths, own) for own in indices]
    if progress is not None:
        shards = [_Watched(shard, progress) for shard in shards]
    return Simulation(run_epoch(config, shards), indices)


def forecast(
    lengths: Lengths, scenario: Scenario, budget: int, progress: Progress | None = None
) -> Forecast:
    """Predict an epoch with this budget. Raises ConfigError for settings that cannot work."""
    config = scenario.config(budget)
    record = simulate(lengths, scenario, budget, progress).record
    ranks = record.ranks
    steps = list(zip(*([step.group for step in rank.steps] for rank in ranks), strict=True))
    delivered = sum(len(group) for step in steps for group in step)
    filtered = sum(len(rank.filtered) for rank in ranks)
    return _sum_up(
        steps,
        config.budget,
        batching="odb",
        rounds=1 + max((step.round for rank in ranks for step in rank.steps[-1:]), default=-1),
        filtered=filtered,
        undelivered=len(lengths.costs) - filtered - delivered,
    )


def forecast_fixed(lengths: Lengths, scenario: Scenario, budget: int) -> Forecast:
    """The same samples in the same order with an ordinary DataLoader: the largest fixed batch size
    whose batch would fit the budget even if all its samples were as long as the longest."""
    config = scenario.config(budget)
    padded = Budget(tokens=budget, multiple=scenario.pad_to_multiple_of)
    kept = [
        [sample for sample in _samples(lengths, own) if trainable(sample)]
        for own in _shares(lengths, scenario)
    ]
    longest = max((sample.cost for shard in kept for sample in shard), default=1)
    size = max(1, budget // padded_length(padded, longest))
    if config.budget.max_samples is not None:
        size = min(size, config.budget.max_samples)
    steps = list(zip_longest(*(_slices(shard, size) for shard in kept), fillvalue=()))
    return _sum_up(
        steps,
        padded,
        batching=f"fixed {size}",
        rounds=0,
        filtered=len(lengths.costs) - sum(map(len, kept)),
        undelivered=0,
    )


def _sum_up(steps: Sequence[Sequence[Group]], limits: Budget, **known: Any) -> Forecast:
    """`steps`: the groups of all ranks, step by step. `known`: fields that are not sums."""
    padded = [
        [batch_cost(limits, load_of_group(group)) if group else 0 for group in step]
        for step in steps
    ]
    sizes = [len(group) for step in steps for group in step]
    batches = sum(map(bool, sizes))
    samples = sum(sizes)
    tokens = sum(s.cost for step in steps for group in step for s in group)
    total = sum(map(sum, padded))
    waited_for = sum(len(step) * max(step) for step in padded)
    alone = (group[0] for step in steps for group in step if len(group) == 1)
    return Forecast(
        budget=limits.tokens,
        steps=len(steps),
        samples=samples,
        tokens=tokens,
        padded_tokens=total,
        padding=1 - tokens / total if total else 0.0,
        mean_batch=samples / batches if batches else 0.0,
        max_batch=max(sizes, default=0),
        largest_batch_tokens=max(map(max, padded), default=0),
        tokens_per_step=total / len(sizes) if sizes else 0.0,
        efficiency=tokens / waited_for if waited_for else 0.0,
        idle=1 - batches / len(sizes) if sizes else 0.0,
        oversize=sum(oversize(limits, sample) for sample in alone),
        **known,
    )


def _shares(lengths: Lengths, scenario: Scenario) -> list[list[int]]:
    """The indices that each rank reads, in order: drawn once, then divided as the sampler does."""
    sampler = ShardSampler(
        len(lengths.costs), Seat(0, 1), shuffle=scenario.shuffle, seed=scenario.seed
    )
    order = list(sampler)
    return [order[rank :: scenario.world_size] for rank in range(scenario.world_size)]


def _samples(lengths: Lengths, indices: Iterable[int]) -> list[Sample]:
    return [Sample(seq, lengths.costs[i], lengths.weights[i]) for seq, i in enumerate(indices)]


def _slices(shard: Sequence[Sample], size: int) -> Iterator[Group]:
    samples = iter(shard)
    while group := tuple(islice(samples, size)):
        yield group


class _Watched(Sequence[Sample]):
    """A shard that reports what is read of it."""

    def __init__(self, samples: Sequence[Sample], progress: Progress) -> None:
        self._samples = samples
        self._progress = progress

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        read = self._samples[index]
        if isinstance(index, slice):
            self._progress(len(self._samples[index]))
        return read
