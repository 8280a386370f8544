"""What every rank runs: the same training loop for each way, and the validation after it."""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import odb
from odb.demo.corpus import VOCABULARY, FunctionDataset, Split
from odb.demo.model import CausalTransformer, ModelSize
from odb.demo.options import DemoOptions
from odb.demo.records import Checkpoint, RankRecord, StepRecord, Way
from odb.demo.ways import FixedSize, Work, make_loader, steps_per_update

LEARNING_RATE = 1e-2
WARM_UP_SHARE = 0.05
LAST_SHARE_OF_RATE = 0.1
WEIGHT_DECAY = 0.01
LARGEST_GRADIENT = 1.0
SMOOTHING_TOKENS = 20_000
"""The loss that is shown while a way trains is a moving average over about so many tokens."""
CHECKPOINTS = 8
"""How many times in a way the weights are put aside for the validation loss."""


ORDER = (Way.ODB, Way.FIXED, Way.SORTED)
"""The order in which the ways train. ODB is the first, as the others' updates are made as large as
its own; so whatever the first one pays for, it is ODB that pays."""


@dataclass(frozen=True)
class Job:
    """What the parent process hands to each rank.

    size: batch size of the fixed ways. news: where rank 0 sends `News`.
    """

    options: DemoOptions
    split: Split
    tokenizer: str
    size: int
    news: Connection


class News(NamedTuple):
    """How far a way is; `samples` of all ranks together, `loss` of rank 0, smoothed."""

    way: Way
    samples: int
    seconds: float
    loss: float
    padding: float


def train_ways(rank: int, world_size: int, job: Job) -> list[RankRecord]:
    """All ways, one after the other, on one rank. Needs a process group."""
    # The workers are forks: threads of the tokenizer's own would not survive in them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    options = job.options
    dataset = FunctionDataset(job.split.train, job.tokenizer, options.max_length)
    held_out = FunctionDataset(job.split.held_out, job.tokenizer, options.max_length)
    batches = _validation_batches(held_out, options.budget)
    _warm_up(options)
    records: list[RankRecord] = []
    accumulate = options.accumulate
    for way in ORDER:
        fixed = FixedSize(job.size, 1 if way is Way.ODB or accumulate is None else accumulate)
        run = WayRun(way, dataset, job, fixed)
        run.train()
        run.validate(batches)
        records.append(run.record)
        if accumulate is None:
            accumulate = steps_per_update(_samples_per_step(run.record, job), job.size)
    return records


class WayRun:
    """One way on one rank: model, optimizer, loop, records."""

    def __init__(self, way: Way, dataset: FunctionDataset, job: Job, fixed: FixedSize) -> None:
        self.way = way
        self.record = RankRecord(way, fixed.accumulate)
        self._dataset = dataset
        self._job = job
        self._fixed = fixed
        self._rank = dist.get_rank()
        self._model = new_model(job.options.seed)
        self._ddp = DistributedDataParallel(self._model)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )
        self._snapshots: list[tuple[float, int, dict[str, torch.Tensor]]] = []
        self._samples = 0
        self._shown_loss: float | None = None
        self._total = len(dataset) * job.options.epochs

    def train(self) -> None:
        """Go through all epochs. The clock covers all that the way has to do, no validation."""
        dist.barrier()
        started = time.perf_counter()
        self._snapshot(0.0)
        loader = make_loader(self.way, self._dataset, self._fixed, self._job.options)
        self.record.measuring = time.perf_counter() - started if self.way is Way.SORTED else 0.0
        asked = time.perf_counter()
        for epoch in range(self._job.options.epochs):
            for number, work in enumerate(loader.epoch(epoch)):
                got = time.perf_counter()
                loss = self._step(work)
                now = time.perf_counter()
                self.record.steps.append(
                    _record(work, epoch, number, (now - started, got - asked, loss))
                )
                self._after_step(now - started)
                asked = time.perf_counter()
        dist.barrier()
        self.record.seconds = time.perf_counter() - started
        self._snapshot(self.record.seconds)
        loader.close()

    def validate(self, batches: list[dict[str, Any]]) -> None:
        """The loss of each snapshot on the held-out functions, each rank on its part of them."""
        mine = batches[self._rank :: dist.get_world_size()]
        for seconds, tokens, weights in self._snapshots:
            self._model.load_state_dict(weights)
            loss_sum, weight = evaluate(self._model, mine)
            self.record.checkpoints.append(Checkpoint(seconds, tokens, loss_sum, weight))

    def _step(self, work: Work) -> float:
        self._samples += work.global_samples
        # Without no_sync, DDP would average the gradients over ranks in steps that need it not.
        with contextlib.nullcontext() if work.update else self._ddp.no_sync():
            loss = self._ddp(**work.batch)
            (loss * work.loss_scale).backward()
        if work.update:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate(self._samples / self._total)
            nn.utils.clip_grad_norm_(self._model.parameters(), LARGEST_GRADIENT)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return float(loss.detach())

    def _after_step(self, seconds: float) -> None:
        if self._samples * CHECKPOINTS >= len(self._snapshots) * self._total:
            self._snapshot(seconds)
        if self._rank == 0:
            last = self.record.steps[-1]
            padded = sum(step.padded for step in self.record.steps)
            tokens = sum(step.tokens for step in self.record.steps)
            samples = min(self._samples, self._total)
            if self._shown_loss is None:
                self._shown_loss = last.loss
            self._shown_loss += (last.loss - self._shown_loss) * min(
                1.0, last.tokens / SMOOTHING_TOKENS
            )
            self._job.news.send(
                News(self.way, samples, seconds, self._shown_loss, 1 - tokens / padded)
            )

    def _snapshot(self, seconds: float) -> None:
        # Evaluated when the way is done: a pause for it would let the loaders read ahead for free.
        weights = {name: value.clone() for name, value in self._model.state_dict().items()}
        tokens = sum(step.tokens for step in self.record.steps)
        self._snapshots.append((seconds, tokens, weights))


def learning_rate(share: float) -> float:
    """The learning rate when this share of all samples has been seen: warm-up, then cosine.

    It goes by samples and not by steps, so that it is the same for all ways.
    """
    if share < WARM_UP_SHARE:
        return LEARNING_RATE * share / WARM_UP_SHARE
    progress = (min(share, 1.0) - WARM_UP_SHARE) / (1 - WARM_UP_SHARE)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return LEARNING_RATE * (LAST_SHARE_OF_RATE + (1 - LAST_SHARE_OF_RATE) * cosine)


def new_model(seed: int) -> CausalTransformer:
    """The model at its start: the same for every way and rank."""
    torch.manual_seed(seed)
    return CausalTransformer(ModelSize(VOCABULARY))


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[dict[str, Any]]) -> tuple[float, int]:
    """The sum of the loss over all label tokens of the batches, and their number."""
    loss_sum, weight = 0.0, 0
    for batch in batches:
        tokens = _label_tokens(batch)
        loss_sum += float(model(**batch)) * tokens
        weight += tokens
    return loss_sum, weight


def _samples_per_step(record: RankRecord, job: Job) -> float:
    """Samples of a rank's step in the mean, the same number on all ranks."""
    steps = torch.tensor(len(record.steps))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    samples = len(job.split.train) * job.options.epochs
    return samples / (int(steps) * dist.get_world_size())


def _validation_batches(dataset: FunctionDataset, budget: int) -> list[dict[str, Any]]:
    """The held-out samples as batches with little padding, the same on all ranks."""
    collate = odb.PadCollate()
    samples = sorted((dataset[i] for i in range(len(dataset))), key=lambda s: len(s["labels"]))
    batches: list[list[dict[str, torch.Tensor]]] = [[]]
    for sample in samples:
        if len(sample["labels"]) * (len(batches[-1]) + 1) > budget and batches[-1]:
            batches.append([])
        batches[-1].append(sample)
    return [collate(batch) for batch in batches]


def _warm_up(options: DemoOptions) -> None:
    """Let PyTorch load and set up what it needs, so that the first way does not pay for it."""
    model = new_model(options.seed)
    for length in (options.max_length, 64):
        tokens = torch.zeros(1, length, dtype=torch.int64)
        model(tokens, tokens).backward()


def _record(
    work: Work, epoch: int, number: int, measured: tuple[float, float, float]
) -> StepRecord:
    seconds, waited, loss = measured
    rows, length = work.batch["input_ids"].shape
    return StepRecord(
        epoch=epoch,
        number=number,
        seconds=seconds,
        waited=waited,
        rows=rows,
        padded=rows * length,
        # Counted in the batch itself, whatever the loader says about it.
        tokens=0 if work.idle else int(work.batch["attention_mask"].sum()),
        update=work.update,
        loss=loss,
        sample_ids=work.sample_ids,
    )


def _label_tokens(batch: dict[str, Any]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())
