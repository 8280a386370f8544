"""Three ways to make batches of the same samples; the training loop does not see a difference."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler

import odb
from odb.demo.corpus import FunctionDataset
from odb.demo.options import DemoOptions
from odb.demo.records import Way


class Work(NamedTuple):
    """A rank's batch for one step.

    loss_scale: factor for the batch's mean loss. update: whether the weights are updated after this
    step; if not, its gradient is kept and added to the next one's.
    global_samples: samples of this step on all ranks together.
    """

    batch: dict[str, Any]
    sample_ids: tuple[int, ...]
    loss_scale: float
    update: bool
    idle: bool
    global_samples: int


class FixedSize(NamedTuple):
    """Of the fixed ways: samples of a batch, and steps whose gradients make one update."""

    size: int
    accumulate: int


class WayLoader(Protocol):
    """One way of batching, on one rank."""

    def epoch(self, number: int) -> Iterator[Work]:
        """This rank's batches of an epoch."""

    def close(self) -> None:
        """Give up workers and groups."""


def largest_safe_batch_size(budget: int, longest: int) -> int:
    """Samples of a fixed batch that stay within the budget even if all are the longest one."""
    return max(1, budget // longest)


def steps_per_update(samples_per_step: float, size: int) -> int:
    """How many batches of `size` samples hold about as many samples as a rank has in a step of ODB.

    With as many samples in each update of the weights, the ways differ in how they batch and not
    in how often they learn.
    """
    return max(1, round(samples_per_step / size))


def make_loader(
    way: Way, dataset: FunctionDataset, fixed: FixedSize, options: DemoOptions
) -> WayLoader:
    """The loader of a way on this rank.

    Collective. For the sorted way it tokenizes the samples once to learn their lengths, each rank
    an equal part of them.
    """
    if way is Way.ODB:
        return OdbLoader(dataset, options)
    # As people do it: shuffled shards of equal size, for which some samples may appear twice.
    order: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=True, seed=options.seed)
    batches: Batches
    if way is Way.FIXED:
        batches = BatchSampler(order, fixed.size, drop_last=False)
    else:
        batches = SortedWindows(order, measure_lengths(dataset), fixed.size, options)
    return FixedLoader(dataset, batches, fixed, options)


class OdbLoader:
    """`odb.ODBDataLoader`, used as in a training script."""

    def __init__(self, dataset: FunctionDataset, options: DemoOptions) -> None:
        self._loader = odb.ODBDataLoader(
            dataset,
            token_budget=options.budget,
            window=options.window,
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
            shuffle=True,
            seed=options.seed,
            timeout=options.time_limit,
        )

    def epoch(self, number: int) -> Iterator[Work]:
        self._loader.set_epoch(number)
        for batch in self._loader:
            info = odb.pop_step_info(batch)
            ids = cast(tuple[int, ...], info.sample_ids)  # of a map-style dataset: indices
            yield Work(batch, ids, info.loss_scale, True, info.idle, info.all_samples_this_step)

    def close(self) -> None:
        self._loader.close()


class FixedLoader:
    """A plain DataLoader whose batches all have the same number of samples."""

    def __init__(
        self, dataset: FunctionDataset, batches: Batches, fixed: FixedSize, options: DemoOptions
    ) -> None:
        self._batches = batches
        self._accumulate = fixed.accumulate
        self._loader = DataLoader(
            _WithIndex(dataset),
            batch_sampler=batches,
            collate_fn=_collate,
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
        )

    def epoch(self, number: int) -> Iterator[Work]:
        order = self._batches.sampler
        assert isinstance(order, DistributedSampler)
        order.set_epoch(number)
        steps = len(self._batches)
        for step, (batch, ids) in enumerate(self._loader):
            first = step - step % self._accumulate
            together = min(self._accumulate, steps - first)
            update = step == first + together - 1
            # Every rank has as many rows as this one: DistributedSampler sees to that.
            yield Work(batch, ids, 1 / together, update, False, len(ids) * dist.get_world_size())

    def close(self) -> None:
        pass


class SortedWindows(Sampler[list[int]]):
    """Batches of like lengths: a rank's order is cut into windows, and each is sorted by length.

    The batches of a window come in random order, the same on all ranks, so that in one step all
    ranks have batches of about the same length.
    """

    def __init__(
        self,
        sampler: DistributedSampler[Any],
        lengths: Sequence[int],
        size: int,
        options: DemoOptions,
    ) -> None:
        self.sampler = sampler
        self._lengths = lengths
        self._size = size
        # Whole batches, so that only the last batch of an epoch is not full.
        self._window = max(1, options.window // size) * size
        self._seed = options.seed

    def __len__(self) -> int:
        return -(-len(self.sampler) // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        shuffle = random.Random(self._seed + self.sampler.epoch)
        indices = list(self.sampler)
        for start in range(0, len(indices), self._window):
            window = indices[start : start + self._window]
            # From the longest down, so that a batch that is not full is of the shortest.
            window.sort(key=self._lengths.__getitem__, reverse=True)
            batches = [window[i : i + self._size] for i in range(0, len(window), self._size)]
            shuffle.shuffle(batches)
            yield from batches


Batches = BatchSampler | SortedWindows
"""Indices of the fixed ways' batches; `sampler` is the DistributedSampler behind them."""


def measure_lengths(dataset: FunctionDataset) -> list[int]:
    """Every sample's length, by tokenizing: each rank does its part, then all exchange them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    lengths = torch.zeros(len(dataset), dtype=torch.int64)
    for index in range(rank, len(dataset), world_size):
        lengths[index] = dataset.length(index)
    dist.all_reduce(lengths)
    return [int(length) for length in lengths]


class _WithIndex(Dataset[tuple[int, dict[str, torch.Tensor]]]):
    """Gives each sample its index, so that what really arrived can be compared afterwards."""

    def __init__(self, dataset: FunctionDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, dict[str, torch.Tensor]]:
        return index, self._dataset[index]


def _collate(
    items: list[tuple[int, dict[str, torch.Tensor]]],
) -> tuple[dict[str, Any], tuple[int, ...]]:
    return odb.PadCollate()([sample for _, sample in items]), tuple(index for index, _ in items)
