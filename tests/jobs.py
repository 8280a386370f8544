"""What ranks do in tests with real processes: iterate a loader and write down what they saw.

Functions here run in rank processes, under every start method, so they are importable and take and
return plain data. The checks are in `tests/checks.py`, which runs in the test process.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, SequentialSampler, get_worker_info

import odb
from odb.info import ODBStepInfo

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shard:
    """One rank's samples by their lengths. labels: "all" positions, or one to three ("few")."""

    lengths: tuple[int, ...]
    labels: str = "all"


def lengths(count: int, shortest: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Random lengths in a range."""
    draw = random.Random(f"{count}-{shortest}-{longest}-{seed}")
    return tuple(draw.randint(shortest, longest) for _ in range(count))


def make_sample(shard: Shard, rank: int, index: int) -> Sample:
    """A sample whose content says whose it is and which: (rank, index) at the start."""
    length = shard.lengths[index]
    draw = random.Random(f"{rank}-{index}")
    tokens = torch.tensor([draw.randrange(1, 100) for _ in range(length)], dtype=torch.int64)
    labels = tokens.clone()
    if shard.labels == "few" and length > 1:
        kept = {draw.randrange(1, length) for _ in range(1 + index % 3)}
        labels = torch.tensor([t if i in kept else -100 for i, t in enumerate(tokens.tolist())])
    name = torch.tensor([rank, index])
    return {"input_ids": tokens, "labels": labels.to(torch.int64), "name": name}


class ShardDataset(Dataset[Sample]):
    def __init__(self, shard: Shard, rank: int) -> None:
        self.shard, self.rank = shard, rank

    def __len__(self) -> int:
        return len(self.shard.lengths)

    def __getitem__(self, index: int) -> Sample:
        return make_sample(self.shard, self.rank, index)


class ShardStream(IterableDataset[Sample]):
    """One rank's samples as a stream that divides itself among workers."""

    def __init__(self, shard: Shard, rank: int) -> None:
        self.shard, self.rank = shard, rank

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, len(self.shard.lengths), stride):
            yield make_sample(self.shard, self.rank, index)


@dataclass
class StepRecord:
    """One step as the trainer saw it. `gradient`: of the scaled mean loss; `loss_sum_gradient`:
    of the summed loss over this rank's own label positions, for the reference."""

    info: ODBStepInfo
    names: list[tuple[int, int]]
    rows: int
    longest: int
    gradient: list[float]
    loss_sum_gradient: list[float]
    label_positions: int


@dataclass
class EpochOfRank:
    """One epoch of one rank."""

    steps: list[StepRecord] = field(default_factory=list)
    filtered: list[Any] = field(default_factory=list)
    oversize: list[Any] = field(default_factory=list)
    undelivered: list[Any] = field(default_factory=list)
    complete: bool = False

    @property
    def names(self) -> list[tuple[int, int]]:
        """The samples delivered, as they name themselves."""
        return [name for step in self.steps for name in step.names]


@dataclass(frozen=True)
class Case:
    """What to run. `break_at`: stop the first epochs at this step; `epochs`: full ones after."""

    shards: tuple[Shard, ...]
    options: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    epochs: int = 1
    break_at: int | None = None


BASE_OPTIONS: dict[str, Any] = {"token_budget": 512, "window": 16, "num_workers": 2}


def loader_for(case: Case, rank: int) -> odb.ODBDataLoader:
    """The loader of a case on a rank."""
    options = {**BASE_OPTIONS, "timeout": 60.0, **case.options}
    shard = case.shards[rank]
    if case.stream:
        return odb.ODBDataLoader(ShardStream(shard, rank), sharded=True, **options)
    dataset = ShardDataset(shard, rank)
    sampler: Any = SequentialSampler(dataset)
    if case.options.get("reshuffle"):
        options.pop("reshuffle")
        sampler = EpochShuffle(len(dataset))
    return odb.ODBDataLoader(dataset, sampler=sampler, **options)


class EpochShuffle:
    """A user's own sampler with an order for each epoch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.size


def run_case(rank: int, world_size: int, case: Case) -> list[EpochOfRank]:
    """Run a case on one rank and return its full epochs."""
    loader = loader_for(case, rank)
    if case.break_at is not None:
        for number, _ in enumerate(loader):
            if number + 1 == case.break_at:
                break
    epochs = [run_epoch(loader) for _ in range(case.epochs)]
    loader.close()
    return epochs


def run_cases(rank: int, world_size: int, cases: Sequence[Case]) -> list[list[EpochOfRank]]:
    """Run several cases one after the other."""
    return [run_case(rank, world_size, case) for case in cases]


def run_epoch(loader: odb.ODBDataLoader) -> EpochOfRank:
    """Iterate one epoch, with a forward and backward pass in every step."""
    record = EpochOfRank()
    for batch in loader:
        info = odb.pop_step_info(batch)
        record.steps.append(observe(batch, info))
    stats = loader.stats
    record.filtered = list(stats.filtered)
    record.oversize = list(stats.oversize)
    record.undelivered = list(stats.undelivered)
    record.complete = stats.complete
    return record


def observe(batch: dict[str, torch.Tensor], info: ODBStepInfo) -> StepRecord:
    """One step of a tiny model in float64, the loss being a mean over label positions."""
    weights = torch.linspace(-1, 1, 100, dtype=torch.float64, requires_grad=True)
    tokens, labels = batch["input_ids"], batch["labels"]
    per_token = (weights[tokens[:, :-1]] * 0.7 - weights[labels[:, 1:].clamp(min=0)]) ** 2
    mask = labels[:, 1:] != -100
    loss_sum = (per_token * mask).sum()
    loss = loss_sum / mask.sum() * info.loss_scale  # NaN for a batch without labels
    (gradient,) = torch.autograd.grad(loss, weights, retain_graph=True)
    (sum_gradient,) = torch.autograd.grad(loss_sum, weights)
    return StepRecord(
        info=info,
        names=[] if info.idle else [(int(r), int(i)) for r, i in batch["name"].tolist()],
        rows=tokens.shape[0],
        longest=tokens.shape[1],
        gradient=gradient.tolist(),
        loss_sum_gradient=[0.0] * 100 if info.idle else sum_gradient.tolist(),
        label_positions=0 if info.idle else int(mask.sum()),
    )


def join_queue_feeders() -> None:
    """Wait for the threads that Python's queues, those of ended workers, close their pipes in."""
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(20)
