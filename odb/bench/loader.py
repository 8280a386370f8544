"""Raw iteration: odb against a plain DataLoader, and what sending samples in chunks buys."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch.utils.data import DataLoader

from odb.bench.data import LengthSpec, SyntheticDataset, draw_lengths
from odb.collate import PadCollate
from odb.errors import ConfigError
from odb.loader import ODBDataLoader
from odb.sharding import Seat, ShardSampler
from odb.source import LARGEST_CHUNK
from odb.testing import run_ranks

PLAIN, ODB, UNCHUNKED = "plain", "odb", "odb unchunked"
ARMS = (PLAIN, ODB, UNCHUNKED)
UNCHUNKED_PART = 10
"""The unchunked arm reads one sample in so many: it is slow, and its speed is what counts."""
SAMPLES_IN_FLIGHT = 2 * LARGEST_CHUNK
"""Read ahead by each worker of the unchunked arm: as many samples as in two full chunks, so that
the arms differ in the number of messages alone."""


@dataclass(frozen=True)
class LoaderBench:
    """What is measured: `repeats` epochs of each arm, one arm after the other in turn, on `ranks`
    local ranks with `workers` worker processes each. `batch_size` is that of the plain loader."""

    lengths: LengthSpec = field(default_factory=LengthSpec)
    window: int = 1024
    budget: int = 16_384
    batch_size: int = 8
    workers: int = 2
    ranks: int = 1
    repeats: int = 5
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if min(self.ranks, self.repeats, self.batch_size) < 1 or self.workers < 0:
            raise ConfigError(
                "ranks, repeats and batch size must be 1 or more and workers 0 or more, not "
                f"{self.ranks}, {self.repeats}, {self.batch_size} and {self.workers}"
            )


class Epoch(NamedTuple):
    """One epoch of one arm, on one rank or on all together (then `seconds` is the slowest's)."""

    samples: int
    batches: int
    tokens: int
    padded_tokens: int
    seconds: float


@dataclass(frozen=True)
class ArmResult:
    """Medians over the repeats. `ratios`: samples/s against the plain loader's, repeat by repeat;
    `ratio` is their median. `mean_batch`: samples per rank and step."""

    arm: str
    samples_per_s: float
    ratio: float
    ratios: tuple[float, ...]
    padding: float
    mean_batch: float


@dataclass(frozen=True)
class LoaderResult:
    """All arms on one number of ranks."""

    ranks: int
    arms: tuple[ArmResult, ...]


def bench_loader(bench: LoaderBench) -> LoaderResult:
    """Run the benchmark in processes of its own. Raises odb.testing.RankError if a rank fails."""
    per_rank = run_ranks(
        _measure_rank,
        bench.ranks,
        bench,
        start_method="fork",
        timeout=bench.timeout,
        process_group=bench.ranks > 1,
    )
    repeats = [
        [_together(parts) for parts in zip(*of_ranks, strict=True)]
        for of_ranks in zip(*per_rank, strict=True)
    ]
    arms = [
        _summarize(arm, [(epochs[i], epochs[0]) for epochs in repeats])
        for i, arm in enumerate(ARMS)
    ]
    return LoaderResult(bench.ranks, tuple(arms))


def _together(parts: tuple[Epoch, ...]) -> Epoch:
    return Epoch(
        samples=sum(part.samples for part in parts),
        batches=sum(part.batches for part in parts),
        tokens=sum(part.tokens for part in parts),
        padded_tokens=sum(part.padded_tokens for part in parts),
        seconds=max(part.seconds for part in parts),
    )


def _summarize(arm: str, pairs: list[tuple[Epoch, Epoch]]) -> ArmResult:
    """`pairs`: this arm's epoch and the plain one, repeat by repeat."""
    speeds = [(own.samples / own.seconds, base.samples / base.seconds) for own, base in pairs]
    ratios = tuple(own / base for own, base in speeds)
    return ArmResult(
        arm=arm,
        samples_per_s=median(own for own, _ in speeds),
        ratio=median(ratios),
        ratios=ratios,
        padding=median(1 - own.tokens / own.padded_tokens for own, _ in pairs),
        mean_batch=median(own.samples / own.batches for own, _ in pairs),
    )


def _measure_rank(rank: int, world_size: int, bench: LoaderBench) -> list[list[Epoch]]:
    """The epochs of this rank, repeat by repeat, arm by arm. Each arm runs once unmeasured: then
    loaders connect their ranks, which a training does once and not every epoch."""
    seat = Seat(rank, world_size)
    runners = [_Runner(arm, bench, seat) for arm in ARMS]
    repeats: list[list[Epoch]] = []
    # In the rank itself and without a refreshing thread: loaders fork their workers here.
    console = Console(stderr=True, quiet=rank != 0)
    with Progress(console=console, auto_refresh=False) as progress:
        task = progress.add_task(f"{world_size} rank(s)", total=(bench.repeats + 1) * len(ARMS))
        for number in range(bench.repeats + 1):
            epochs = []
            for runner in runners:
                epochs.append(runner.run(number))
                progress.advance(task)
                progress.refresh()
            if number > 0:
                repeats.append(epochs)
    for runner in runners:
        runner.close()
    return repeats


class _Runner:
    """One arm on one rank: its loader, and the epochs that it has run."""

    def __init__(self, arm: str, bench: LoaderBench, seat: Seat) -> None:
        lengths = draw_lengths(bench.lengths)
        if arm == UNCHUNKED:
            lengths = lengths[: -(-len(lengths) // UNCHUNKED_PART)]
        self._arm = arm
        self._seat = seat
        self._dataset = SyntheticDataset(lengths)
        self._sampler = ShardSampler(len(lengths), seat, shuffle=True, seed=bench.lengths.seed)
        self._loader = _make_loader(arm, bench, self._dataset, self._sampler)

    def run(self, number: int) -> Epoch:
        """Iterate one epoch: the time from the start of its workers to its last batch."""
        self._sampler.set_epoch(number)
        samples = batches = padded = 0
        if self._seat.world_size > 1:
            dist.barrier()
        start = end = time.perf_counter()
        for batch in self._batches():
            rows, length = batch["input_ids"].shape
            samples += rows
            batches += 1
            padded += rows * length
            end = time.perf_counter()
        if samples != len(self._sampler):
            raise RuntimeError(f"{self._arm!r} delivered {samples} of {len(self._sampler)} samples")
        tokens = sum(self._dataset.lengths[i] for i in self._sampler)
        return Epoch(samples, batches, tokens, padded, end - start)

    def _batches(self) -> Iterator[dict[str, Any]]:
        """The batches of an epoch, without idle ones: they hold no sample."""
        if isinstance(self._loader, ODBDataLoader):
            return (batch for batch, info in self._loader.steps() if not info.idle)
        return iter(self._loader)

    def close(self) -> None:
        """Give up the loader's connections. All ranks close their loaders in the same order."""
        if isinstance(self._loader, ODBDataLoader):
            self._loader.close()


def _make_loader(
    arm: str, bench: LoaderBench, dataset: SyntheticDataset, sampler: ShardSampler
) -> DataLoader[Any] | ODBDataLoader:
    workers: dict[str, Any] = {"num_workers": bench.workers}
    if arm == PLAIN:
        return DataLoader(
            dataset, bench.batch_size, sampler=sampler, collate_fn=PadCollate(), **workers
        )
    if arm == UNCHUNKED and bench.workers:
        workers["prefetch_factor"] = SAMPLES_IN_FLIGHT
    return ODBDataLoader(
        dataset,
        chunk=1 if arm == UNCHUNKED else None,
        token_budget=bench.budget,
        window=bench.window,
        collate_fn=PadCollate(),
        sampler=sampler,
        timeout=bench.timeout,
        **workers,
    )
