"""Gives every rank its part of a dataset, every sample to exactly one rank.

`DistributedSampler` repeats samples (or drops some) so that all ranks get equally many. Here ranks
may get different numbers: the alignment protocol takes care of that.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from odb.errors import ConfigError, SampleError
from odb.info import SampleId


class Seat(NamedTuple):
    """A rank's place among those that share a dataset."""

    rank: int
    world_size: int


class Fetched(NamedTuple):
    """A sample as it was read, or the error that reading it raised."""

    sample_id: SampleId
    sample: Any
    error: SampleError | None


class ShardSampler(Sampler[int]):
    """The indices of one rank: every `world_size`-th of the (shuffled) dataset, from `rank` on.

    All ranks shuffle alike, with `seed + epoch` as `DistributedSampler` does, so that together
    they read each index exactly once.
    """

    def __init__(self, size: int, seat: Seat, *, shuffle: bool, seed: int) -> None:
        self.size = size
        self.seat = seat
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration takes."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.size, generator=generator).tolist()
        else:
            order = list(range(self.size))
        return iter(order[self.seat.rank :: self.seat.world_size])

    def __len__(self) -> int:
        return len(range(self.seat.rank, self.size, self.seat.world_size))


class _Transparent:
    """Stands before a dataset; attributes read and set by a `worker_init_fn` reach the dataset."""

    dataset: Any
    _own: tuple[str, ...] = ("dataset", "seat", "sharded", "epoch")

    def __getattr__(self, name: str) -> Any:
        # Called for what this object lacks. While being unpickled it lacks even `dataset`.
        if name in self._own:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.dataset, name, value)


class IndexedReader(_Transparent, Dataset[Fetched]):
    """A map-style dataset whose samples come with their index, or with the error of reading it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: Sequence[Any]) -> list[Fetched]:
        """Read a chunk. Called by the DataLoader in place of one call for each index."""
        read_many = getattr(self.dataset, "__getitems__", None)
        if read_many is not None:
            try:
                samples = read_many(indices)
                pairs = zip(indices, samples, strict=True)
                return [Fetched(_plain(i), sample, None) for i, sample in pairs]
            except Exception:  # one of them is at fault: read one by one to find out which
                pass
        return [self[index] for index in indices]

    def __getitem__(self, index: Any) -> Fetched:
        try:
            return Fetched(_plain(index), self.dataset[index], None)
        except Exception as error:
            return Fetched(_plain(index), None, sample_error(_plain(index), error))


def _plain(index: Any) -> SampleId:
    """An index as a sample's name: a tensor, as some samplers yield it, equals no other."""
    return index.item() if isinstance(index, torch.Tensor) and index.ndim == 0 else index


Sharded = bool | Literal["workers"]
"""Whether an iterable dataset divides itself: not at all, by rank and worker, or by worker only."""


class StreamReader(_Transparent, IterableDataset[Fetched]):
    """One rank's and worker's part of a stream, each sample with its position in the stream.

    Unless `sharded`, every worker of every rank iterates the dataset from the start. Of W ranks,
    rank r keeps the samples at the positions r, r + W, r + 2W, ..., and its workers take turns with
    these; so the dataset must yield the same samples in the same order everywhere, as an ordinary
    IterableDataset does. With `sharded=True` the dataset itself yields different samples on every
    rank and worker, and all of them are kept. With `sharded="workers"` it yields different samples
    on every worker (by `get_worker_info`, or a `worker_init_fn`), but the same on every rank: then
    each rank keeps its part of what each worker yields.
    """

    def __init__(self, dataset: Iterable[Any], seat: Seat, *, sharded: Sharded) -> None:
        self.dataset = dataset
        self.seat = seat
        self.sharded = sharded
        # In shared memory, as persistent workers keep the copy that they were started with.
        self.epoch = torch.zeros((), dtype=torch.int64)
        self.epoch.share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, also in workers that are already running."""
        self.epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Fetched]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        rank, world_size = self.seat
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(int(self.epoch))
        position = -1
        try:
            for position, sample in enumerate(self.dataset):
                if self.sharded == "workers":
                    if position % world_size == rank:
                        yield Fetched((worker, position), sample, None)
                elif self.sharded:
                    yield Fetched((rank, worker, position), sample, None)
                elif position % world_size == rank and position // world_size % workers == worker:
                    yield Fetched(position, sample, None)
        except Exception as error:
            failed: SampleId = position + 1
            if self.sharded:
                failed = (rank, worker, position + 1)
            if self.sharded == "workers":
                failed = (worker, position + 1)
            yield Fetched(failed, None, sample_error(failed, error))


def reader_for(dataset: Any, seat: Seat, *, sharded: Sharded) -> IndexedReader | StreamReader:
    """The reader for a dataset of either kind. Raises ConfigError for what is no dataset."""
    if isinstance(dataset, IterableDataset):
        if type(dataset).__module__.partition(".")[0] == "datasets" and not sharded:
            raise ConfigError(
                "a Hugging Face IterableDataset divides itself among workers: pass "
                "split_dataset_by_node(dataset, rank, world_size) and sharded=True"
            )
        return StreamReader(dataset, seat, sharded=sharded)
    if not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"a {type(dataset).__name__} is neither a map-style dataset (__getitem__, __len__) nor "
            "a torch.utils.data.IterableDataset"
        )
    if sharded:
        raise ConfigError("sharded=True is for an IterableDataset; pass sampler= for this dataset")
    return IndexedReader(dataset)


def sample_error(sample_id: SampleId, error: Exception) -> SampleError:
    """Wrap what reading or measuring a sample raised; keeps text only, as it has to travel."""
    info = get_worker_info()
    return SampleError(
        sample_id,
        None if info is None else info.id,
        "".join(traceback.format_exception_only(error)).strip(),
        "".join(traceback.format_exception(error)),
    )
