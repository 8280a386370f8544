"""Reads samples through an ordinary `torch.utils.data.DataLoader`, in chunks, already measured."""

from __future__ import annotations

import logging
import multiprocessing as mp
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, Sampler

from odb.chunks import PackedSamples, pack
from odb.costs import CostModel, Measured
from odb.errors import ConfigError, SampleError
from odb.hooks import NO_HOOKS, Hooks
from odb.info import SampleId
from odb.sharding import Fetched, Seat, Sharded, ShardSampler, reader_for, sample_error
from odb.workers import WorkerReader, find_ended, spare_the_trainer

logger = logging.getLogger("odb")

LARGEST_CHUNK = 64
"""Samples of a message between processes: enough to make its fixed cost small for each."""


class Entry(NamedTuple):
    """One sample on its way into the window: its content and what it costs, or its error."""

    sample_id: SampleId
    sample: Any
    measured: Measured
    error: SampleError | None


@dataclass
class Chunk:
    """Consecutive samples of one worker, as they cross to the main process."""

    sample_ids: list[SampleId]
    measured: list[Measured]
    errors: dict[int, SampleError]
    packed: PackedSamples

    def unpack(self) -> Iterator[Entry]:
        """The samples one by one."""
        rows = zip(self.sample_ids, self.packed.own().unpack(), self.measured, strict=True)
        for i, (sample_id, sample, measured) in enumerate(rows):
            yield Entry(sample_id, sample, measured, self.errors.get(i))


@dataclass(frozen=True)
class ChunkMaker:
    """The inner DataLoader's collate function: measures and packs what a worker has read."""

    costs: CostModel
    hooks: Hooks = NO_HOOKS

    def __call__(self, fetched: Sequence[Fetched]) -> Chunk:
        measured: list[Measured] = []
        errors: dict[int, SampleError] = {}
        for i, item in enumerate(fetched):
            error = item.error
            result = Measured(0, 0, ())
            if error is None:
                try:
                    self.hooks.on_sample(item.sample_id)
                    result = self.costs.measure(item.sample)
                except Exception as raised:
                    error = sample_error(item.sample_id, raised)
            if error is not None:
                errors[i] = error
            measured.append(result)
        ids = [item.sample_id for item in fetched]
        return Chunk(ids, measured, errors, pack([item.sample for item in fetched]))


@dataclass(frozen=True)
class ReadOptions:
    """How samples are read.

    workers: what is handed on to the inner DataLoader as it is (num_workers, prefetch_factor,
        persistent_workers, worker_init_fn, generator, multiprocessing_context, timeout, ...).
    """

    sampler: Sampler[Any] | None
    shuffle: bool
    seed: int
    sharded: Sharded
    chunk: int
    workers: dict[str, Any] = field(default_factory=dict)


class Source:
    """The samples of one rank, epoch by epoch."""

    def __init__(self, dataset: Any, costs: CostModel, options: ReadOptions, seat: Seat) -> None:
        reader = reader_for(dataset, seat, sharded=options.sharded)
        self._epoch_setters: list[Callable[[int], None]] = []
        sampler = options.sampler
        if isinstance(reader, IterableDataset):
            self._epoch_setters.append(reader.set_epoch)
        else:
            if sampler is None:
                size = _size_of(dataset)
                sampler = ShardSampler(size, seat, shuffle=options.shuffle, seed=options.seed)
            if hasattr(sampler, "set_epoch"):
                self._epoch_setters.append(sampler.set_epoch)
            if hasattr(dataset, "set_epoch"):
                self._epoch_setters.append(dataset.set_epoch)
        self._make = partial(
            DataLoader, reader, batch_size=options.chunk, sampler=sampler, **options.workers
        )
        self._maker = ChunkMaker(costs)
        self._renew()
        self._reader: WorkerReader[Chunk] | None = None

    def _renew(self) -> None:
        """Take another DataLoader: its workers are yet to start."""
        self._loader: DataLoader[Any] = self._make(collate_fn=self._maker)
        self._workers: list[BaseProcess] | None = None

    def open(self, epoch: int, hooks: Hooks = NO_HOOKS) -> Stream:
        """Start reading an epoch. Call it in the main thread: there PyTorch watches its workers,
        and a fork is safest.

        What goes wrong is raised by the first pull: this rank may be the only one, and the others
        hear of it only in the epoch.
        """
        try:
            for set_epoch in self._epoch_setters:
                set_epoch(epoch)
            self._refresh(hooks)
            return self._start()
        except Exception as error:
            self._renew()
            return Stream(map(_fail, [error]))

    def _refresh(self, hooks: Hooks) -> None:
        """Renew the DataLoader if it cannot serve another epoch."""
        if self._reader is not None and self._reader.lost:
            self._renew()
        elif self._loader.persistent_workers and (ended := find_ended(self._workers or [])):
            how = "; ".join(str(error) for error in ended)
            logger.warning("odb: between epochs, %s. New workers take over", how)
            self._renew()
        if hooks != self._maker.hooks:
            self._maker = replace(self._maker, hooks=hooks)
            self._renew()

    def _start(self) -> Stream:
        if not self._loader.num_workers:
            return Stream(iter(self._loader))
        before = mp.active_children()
        chunks = iter(self._loader)
        if self._workers is None or not self._loader.persistent_workers:
            started = [process for process in mp.active_children() if process not in before]
            # More of them: others were started too, and it is not known which are whose.
            known = len(started) == self._loader.num_workers
            self._workers = sorted(started, key=_number) if known else []
        self._reader = WorkerReader(chunks, self._workers)
        spare_the_trainer()
        return Stream(chunks, self._reader)


def _fail(error: Exception) -> Chunk:
    raise error


def _number(process: BaseProcess) -> list[int]:
    """The order in which processes were started: the names that Python gives them count them."""
    return [int(part) for part in re.findall(r"\d+", process.name)]


class Stream:
    """The samples of one epoch, in an order that does not depend on timing. With workers a reader
    gets the chunks."""

    def __init__(self, chunks: Iterator[Chunk], reader: WorkerReader[Chunk] | None = None) -> None:
        self._chunks: Iterator[Chunk] | None = chunks if reader is None else None
        self._reader = reader
        self._buffer: deque[Entry] = deque()

    def pull(self, limit: int) -> list[Entry]:
        """At least one and at most `limit` samples; none at the end of the epoch."""
        while not self._buffer:
            chunk = self._next()
            if chunk is None:
                self.close()
                return []
            self._buffer.extend(chunk.unpack())
        return [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]

    def _next(self) -> Chunk | None:
        if self._reader is not None:
            return self._reader.next()
        return None if self._chunks is None else next(self._chunks, None)

    def close(self) -> None:
        """Let go of the iterator: workers that do not persist end with it."""
        reader, self._reader, self._chunks = self._reader, None, None
        if reader is not None:
            reader.close()
        self._buffer.clear()


def _size_of(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise ConfigError(
            f"a {type(dataset).__name__} has no length, so it cannot be divided among ranks: pass "
            "sampler=, or make it an IterableDataset"
        ) from None
