"""Scenarios, each drawn from the campaign's seed and the number of its run, and nothing else."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from odb.errors import ConfigError
from odb.sharding import Seat, ShardSampler
from odb.testing import (
    BlockInSample,
    DelayExchange,
    DropConnection,
    Fault,
    FaultPlan,
    KillRank,
    KillWorker,
    RaiseInBatch,
    RaiseInSample,
    SlowRank,
    StopRank,
)
from odb.testing.ranks import StartMethod


class Kind(Enum):
    """What happens in a run."""

    NOTHING = "no fault"
    LEAVE = "trainer leaves early"
    RAISE_IN_SAMPLE = "sample raises"
    RAISE_IN_BATCH = "batch raises"
    KILL_WORKER = "worker killed"
    KILL_RANK = "rank killed"
    DROP_CONNECTION = "connections dropped"
    STOP_RANK = "rank stopped, continued"
    SLOW_RANK = "rank slow"
    DELAY_EXCHANGE = "report late"
    BLOCK_IN_SAMPLE = "sample blocks for ever"


class Layout(Enum):
    """How samples get to ranks. OWN: each rank has a dataset and a sampler. SHARED: odb divides and
    shuffles one dataset. STREAM: odb divides one stream."""

    OWN = "own shards"
    SHARED = "shared dataset"
    STREAM = "shared stream"


TIMEOUT_S = 30.0
"""The loader's `timeout` in a run that should never come to it."""
STUCK_TIMEOUT_S = 3.0
RANK_NAMES = 10_000
"""With shards of their own, the samples of rank r are called r * RANK_NAMES and so on."""


@dataclass(frozen=True)
class Space:
    """From what runs are drawn."""

    seed: int = 1
    ranks: tuple[int, ...] = (2, 3, 4)
    kinds: tuple[Kind, ...] = tuple(Kind)

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 2 or max(self.ranks) > 16:
            raise ConfigError("ranks must be numbers from 2 to 16, such as 2,3,4")
        if not self.kinds:
            raise ConfigError("there must be at least one kind of fault")


@dataclass(frozen=True)
class Scenario:
    """One run. shards: lengths of the samples, for each rank, or of all samples in one tuple.
    leave_at: the step at which the victim's trainer leaves. gradient: ranks meet in a collective
    of their own after each step."""

    run: int
    kind: Kind
    world_size: int
    victim: int
    layout: Layout
    shards: tuple[tuple[int, ...], ...]
    options: dict[str, Any] = field(hash=False)
    start_method: StartMethod
    epochs: int
    pause_s: float
    gradient: bool
    leave_at: int | None
    plan: FaultPlan

    @property
    def joined(self) -> bool:
        """Whether an epoch delivers every sample."""
        return bool(self.options["join"])

    @property
    def stops_idle(self) -> bool:
        """Whether a drained rank's iteration ends."""
        return bool(self.options["idle"] == "stop")

    def names(self) -> dict[int, int]:
        """Every sample's length, by its name."""
        if self.layout is Layout.OWN:
            return {
                rank * RANK_NAMES + i: length
                for rank, shard in enumerate(self.shards)
                for i, length in enumerate(shard)
            }
        return dict(enumerate(self.shards[0]))

    def describe(self) -> str:
        """In one line."""
        sizes = ", ".join(str(len(shard)) for shard in self.shards)
        fault = self.plan.faults[0] if self.plan.faults else self.kind.value
        if self.leave_at is not None:
            fault = f"the trainer of rank {self.victim} leaves after {self.leave_at} steps"
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return (
            f"{self.world_size} ranks ({self.start_method}), {self.layout.value} of {sizes} "
            f"samples, {self.epochs} epochs, gradient={self.gradient}, {options}; {fault}"
        )


def draw(space: Space, run: int) -> Scenario:
    """The scenario of a run."""
    rng = random.Random(f"odb-chaos-{space.seed}-{run}")
    kind = rng.choice(space.kinds)
    world_size = rng.choice(space.ranks)
    victim = rng.randrange(world_size)
    budget = rng.choice([48, 96, 256])
    layout = rng.choice(list(Layout))
    shards = _shards(rng, layout, world_size, victim, budget)
    epochs = rng.choice([1, 1, 2])
    methods: list[StartMethod] = ["fork", "fork", "fork", "fork", "spawn", "forkserver"]
    method = rng.choice(methods)
    options = _options(rng, kind, budget)
    if options["num_workers"]:
        # A forked process cannot use the fork server of the one that it was forked from.
        rare = ["spawn"] if method == "fork" else ["spawn", "forkserver"]
        options["persistent_workers"] = rng.random() < 0.5
        options["multiprocessing_context"] = rng.choice([*["fork"] * 6, *rare])
    # Drawn apart, so that the rest of a run is what it was before there were blocks.
    blocks = random.Random(f"odb-chaos-blocks-{space.seed}-{run}").choice([1, 1, 2, 3])
    options["accumulation_steps"] = blocks if options["idle"] == "pad" else 1
    fault = _fault(rng, kind, victim, _names_of(layout, shards, world_size, victim), epochs)
    return Scenario(
        run=run,
        kind=kind,
        world_size=world_size,
        victim=victim,
        layout=layout,
        shards=shards,
        options=options,
        start_method=method,
        epochs=epochs,
        pause_s=rng.choice([0.0, 0.002, 0.01]),
        gradient=options["idle"] == "pad" and kind is not Kind.LEAVE and rng.random() < 0.6,
        leave_at=rng.randint(1, 8) if kind is Kind.LEAVE else None,
        plan=FaultPlan(*([] if fault is None else [fault]), must_fire=False),
    )


def _shards(
    rng: random.Random, layout: Layout, world_size: int, victim: int, budget: int
) -> tuple[tuple[int, ...], ...]:
    longest = rng.choice([budget // 4, budget, budget + budget // 4])

    def shard(size: int) -> tuple[int, ...]:
        return tuple(0 if rng.random() < 0.03 else rng.randint(1, longest) for _ in range(size))

    if layout is not Layout.OWN:
        return (shard(rng.randint(40, 100) * world_size),)
    sizes = [
        rng.choice([0, 1, rng.randint(5, 40), rng.randint(40, 120)]) for _ in range(world_size)
    ]
    sizes[victim] = rng.randint(50, 120)
    return tuple(map(shard, sizes))


def _names_of(
    layout: Layout, shards: tuple[tuple[int, ...], ...], world_size: int, victim: int
) -> list[int]:
    """What the dataset calls the samples that the victim reads, as it reads them in epoch 0."""
    if layout is Layout.OWN:
        order = list(range(len(shards[victim])))
        return [i for i in order if shards[victim][i]]
    size, seat = len(shards[0]), Seat(victim, world_size)
    order = list(ShardSampler(size, seat, shuffle=layout is Layout.SHARED, seed=0))
    return [i for i in order if shards[0][i]]


def _options(rng: random.Random, kind: Kind, budget: int) -> dict[str, Any]:
    join = rng.random() < 0.7
    workers = rng.choice([0, 0, 1, 2])
    if kind is Kind.KILL_WORKER:
        workers = rng.choice([1, 2])
    return {
        "token_budget": budget,
        "window": rng.choice([4, 8, 16, 32]),
        "slow_start": rng.choice([1, 4, 64]),
        "prefetch": rng.choice([1, 2, 4]),
        "chunk": rng.choice([1, 3, 8, None]),
        "packed": rng.random() < 0.25,
        "max_samples": rng.choice([None, None, 4]),
        "join": join,
        "quota": None if join else rng.choice([None, 20, 60, 500]),
        "idle": rng.choice(["pad", "pad", "stop"]) if join else "pad",
        "num_workers": workers,
        "timeout": STUCK_TIMEOUT_S if kind is Kind.BLOCK_IN_SAMPLE else TIMEOUT_S,
        "warn_after": 1.0,
    }


def _fault(
    rng: random.Random, kind: Kind, rank: int, names: list[int], epochs: int
) -> Fault | None:
    step, round_ = rng.randint(0, 7), rng.randint(0, 3)
    epoch = rng.choice([None, rng.randrange(epochs)])
    sample = rng.choice(names[: max(1, len(names) * 2 // 3)])
    match kind:
        case Kind.NOTHING | Kind.LEAVE:
            return None
        case Kind.RAISE_IN_SAMPLE:
            return RaiseInSample(rank, sample)
        case Kind.RAISE_IN_BATCH:
            return RaiseInBatch(rank, step, epoch)
        case Kind.KILL_WORKER:
            if rng.random() < 0.5:
                return KillWorker(rank, worker=0)
            return KillWorker(rank, sample=sample)
        case Kind.KILL_RANK:
            if rng.random() < 0.5:
                return KillRank(rank, step=step, epoch=epoch)
            return KillRank(rank, round=round_, epoch=epoch)
        case Kind.DROP_CONNECTION:
            return DropConnection(rank, round_, epoch)
        case Kind.STOP_RANK:
            return StopRank(rank, step, rng.choice([0.5, 1.5, 4.0]), epoch)
        case Kind.SLOW_RANK:
            if rng.random() < 0.5:
                return SlowRank(rank, seconds_per_step=0.05)
            return SlowRank(rank, seconds_per_sample=0.02)
        case Kind.DELAY_EXCHANGE:
            return DelayExchange(rank, round_, rng.choice([0.3, 1.5, 4.0]), epoch)
        case Kind.BLOCK_IN_SAMPLE:
            return BlockInSample(rank, sample)
