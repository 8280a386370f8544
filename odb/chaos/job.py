"""What a rank of a chaos run does: it trains, knows of no fault, and writes down what it sees."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

import odb
from odb.chaos.draw import RANK_NAMES, Kind, Layout, Scenario
from odb.info import ODBStepInfo

GRADIENT_TIMEOUT_S = 3.0
"""Of the trainer's own collective, where a rank may be lost: Gloo does not tell every rank."""

TRACES = "traces"


class StepSeen(NamedTuple):
    """A step: its number, its round, the names of its samples, and the number of all ranks'."""

    step: int
    round: int
    names: tuple[int, ...]
    global_samples: int
    idle: bool


@dataclass
class EpochSeen:
    """An epoch. undelivered: how many samples the loader lists so. wrong: samples whose content is
    another's."""

    steps: list[StepSeen] = field(default_factory=list)
    complete: bool = False
    filtered: int = 0
    undelivered: int = 0
    wrong: int = 0


class ErrorSeen(NamedTuple):
    """How a rank's training ended. rank, missing: which it names. stepping: it came in place of a
    step, and not when an epoch began."""

    name: str
    text: str
    rank: int | None
    step: int | None
    missing: tuple[int, ...]
    stepping: bool


@dataclass
class RankSeen:
    """All that a rank saw. heard_at: when it was first told that something is wrong."""

    epochs: list[EpochSeen] = field(default_factory=list)
    error: ErrorSeen | None = None
    heard_at: float | None = None


def _sample(name: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.full((length,), name % 97), "name": torch.tensor([name])}


class ShardDataset(Dataset[dict[str, torch.Tensor]]):
    """Samples that carry their names."""

    def __init__(self, lengths: Sequence[int], first: int = 0) -> None:
        self.lengths, self.first = lengths, first

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return _sample(self.first + index, self.lengths[index])


class ShardStream(IterableDataset[dict[str, torch.Tensor]]):
    """The same samples on every rank and worker."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (_sample(name, length) for name, length in enumerate(self.lengths))


def loader_of(scenario: Scenario, rank: int, **options: Any) -> odb.ODBDataLoader:
    """The loader of a rank."""
    options = {**scenario.options, **options}
    if scenario.layout is Layout.STREAM:
        return odb.ODBDataLoader(ShardStream(scenario.shards[0]), **options)
    if scenario.layout is Layout.SHARED:
        return odb.ODBDataLoader(ShardDataset(scenario.shards[0]), shuffle=True, **options)
    dataset = ShardDataset(scenario.shards[rank], rank * RANK_NAMES)
    return odb.ODBDataLoader(dataset, sampler=range(len(dataset)), **options)


def train(rank: int, world_size: int, scenario: Scenario, folder: Path) -> RankSeen:
    """Train the epochs of a scenario."""
    _be_quiet(folder / f"rank-{rank}.log")
    seen = RankSeen()

    def on_lost(error: odb.PeerLostError) -> None:
        seen.heard_at = seen.heard_at or time.time()

    loader = loader_of(scenario, rank, trace_dir=folder / TRACES, on_peer_lost=on_lost)
    trainer = _Trainer(scenario, rank)
    stepping = False
    try:
        for _ in range(scenario.epochs):
            stepping = False
            steps = loader.steps()
            stepping = True
            seen.epochs.append(EpochSeen())
            trainer.epoch(loader, steps, seen.epochs[-1])
        stepping = False
        loader.close()
    except odb.ODBError as error:
        seen.heard_at = seen.heard_at or time.time()
        seen.error = ErrorSeen(
            type(error).__name__,
            str(error),
            getattr(error, "rank", None),
            getattr(error, "step", None),
            getattr(error, "missing", ()),
            stepping,
        )
        loader.close()
    return seen


def _be_quiet(log: Path) -> None:
    """Everything that this process says goes to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    logging.getLogger("odb").setLevel(logging.INFO)
    logging.getLogger("odb").addHandler(logging.StreamHandler())


class _Trainer:
    """Takes steps as a training loop does, and may meet the other ranks in each."""

    def __init__(self, scenario: Scenario, rank: int) -> None:
        self._scenario = scenario
        self._work = random.Random(rank)
        self._group: Any = None
        if scenario.gradient:
            may_lose = scenario.kind in (Kind.KILL_RANK, Kind.DROP_CONNECTION)
            seconds = GRADIENT_TIMEOUT_S if may_lose else 10 * scenario.options["timeout"]
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        self._victim = rank == scenario.victim

    def epoch(self, loader: odb.ODBDataLoader, steps: Any, seen: EpochSeen) -> None:
        try:
            for batch, info in steps:
                self._step(batch, info, seen)
                if self._victim and len(seen.steps) == self._scenario.leave_at:
                    steps.close()
                    break
        finally:
            stats = loader.stats
            seen.complete = stats.complete
            seen.filtered = len(stats.filtered)
            seen.undelivered = len(stats.undelivered)

    def _step(self, batch: Any, info: ODBStepInfo, seen: EpochSeen) -> None:
        names: list[int] = [] if info.idle else batch["name"][:, 0].tolist()
        tokens = batch["input_ids"][:, 0].tolist()
        seen.wrong += sum(t != name % 97 for t, name in zip(tokens, names, strict=False))
        seen.steps.append(
            StepSeen(info.step, info.round, tuple(names), info.global_samples, info.idle)
        )
        time.sleep(self._work.random() * self._scenario.pause_s)
        if self._group is not None:
            try:
                dist.all_reduce(torch.ones(1), group=self._group)
            except RuntimeError:  # a rank is gone: the loader says which
                self._group = None
