"""What recording traces costs: epochs of one loader with it and one without, side by side."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch.distributed as dist
from rich.console import Console
from rich.progress import track

from odb.bench.data import LengthSpec, SyntheticDataset, draw_lengths
from odb.collate import PadCollate
from odb.errors import ConfigError
from odb.loader import ODBDataLoader
from odb.sharding import Seat, ShardSampler
from odb.testing import run_ranks
from odb.tracing.reading import read_rank
from odb.tracing.recorder import Recorder, TraceFolder
from spec.rank import Setup, start, transition


@dataclass(frozen=True)
class TraceBench:
    """`repeats` pairs of epochs, without a model, on `ranks` local ranks with `workers` worker
    processes each; in every other pair the loader that records goes first."""

    lengths: LengthSpec = field(default_factory=LengthSpec)
    window: int = 1024
    budget: int = 16_384
    workers: int = 2
    ranks: int = 1
    repeats: int = 15
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if min(self.ranks, self.repeats) < 1 or self.workers < 0:
            raise ConfigError(
                "ranks and repeats must be 1 or more and workers 0 or more, not "
                f"{self.ranks}, {self.repeats} and {self.workers}"
            )


class Pair(NamedTuple):
    """Seconds of an epoch without recording and of one with it; the slowest rank's."""

    off: float
    on: float


@dataclass(frozen=True)
class TraceResult:
    """ratios: time with recording against time without, pair by pair; `ratio` is their median.
    recording_share: of an epoch's time, what recording its events takes by itself, once more in
    one thread. Bytes and steps are those of one rank's epoch."""

    ranks: int
    seconds_off: float
    ratio: float
    ratios: tuple[float, ...]
    recording_share: float
    samples: int
    steps: int
    bytes: int

    @property
    def bytes_per_sample(self) -> float:
        """Of the trace."""
        return self.bytes / self.samples

    @property
    def bytes_per_step(self) -> float:
        """Of the trace."""
        return self.bytes / self.steps


def bench_tracing(bench: TraceBench) -> TraceResult:
    """Run the benchmark in processes of its own. Raises odb.testing.RankError if a rank fails."""
    with tempfile.TemporaryDirectory(prefix="odb-traces-") as folder:
        per_rank: list[_RankResult] = run_ranks(
            _measure_rank,
            bench.ranks,
            bench,
            folder,
            start_method="fork",
            timeout=bench.timeout,
            process_group=bench.ranks > 1,
        )
    pairs = [
        Pair(max(pair.off for pair in of_ranks), max(pair.on for pair in of_ranks))
        for of_ranks in zip(*(result.pairs for result in per_rank), strict=True)
    ]
    ratios = tuple(pair.on / pair.off for pair in pairs)
    first, off = per_rank[0], median(pair.off for pair in pairs)
    return TraceResult(
        ranks=bench.ranks,
        seconds_off=off,
        ratio=median(ratios),
        ratios=ratios,
        recording_share=first.recording / off,
        samples=first.samples,
        steps=first.steps,
        bytes=first.bytes,
    )


class _RankResult(NamedTuple):
    pairs: list[Pair]
    recording: float
    samples: int
    steps: int
    bytes: int


def _measure_rank(rank: int, world_size: int, bench: TraceBench, folder: str) -> _RankResult:
    seat = Seat(rank, world_size)
    loaders = [_make_loader(bench, seat, None), _make_loader(bench, seat, folder)]
    pairs: list[Pair] = []
    # No refreshing thread: loaders fork their workers here.
    console = Console(stderr=True, quiet=rank != 0)
    numbers = range(bench.repeats + 1)
    for number in track(numbers, f"{world_size} rank(s)", console=console, auto_refresh=False):
        seconds = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            seconds[which] = _epoch(loaders[which], world_size)
        if number > 0:  # the first connects the ranks
            pairs.append(Pair(*seconds))
    path = Path(folder, "epoch-00001", f"rank-{rank:05}.jsonl")
    stats = loaders[1].stats
    for loader in loaders:
        loader.close()
    recording = median(_record_again(path, Path(folder, f"again-{rank}-{i}")) for i in range(3))
    return _RankResult(pairs, recording, stats.samples, stats.steps, path.stat().st_size)


def _make_loader(bench: TraceBench, seat: Seat, trace_dir: str | None) -> ODBDataLoader:
    lengths = draw_lengths(bench.lengths)
    sampler = ShardSampler(len(lengths), seat, shuffle=True, seed=bench.lengths.seed)
    return ODBDataLoader(
        SyntheticDataset(lengths),
        token_budget=bench.budget,
        window=bench.window,
        collate_fn=PadCollate(),
        sampler=sampler,
        num_workers=bench.workers,
        timeout=bench.timeout,
        trace_dir=trace_dir,
    )


def _epoch(loader: ODBDataLoader, world_size: int) -> float:
    if world_size > 1:
        dist.barrier()
    began = time.perf_counter()
    for _ in loader.steps():
        pass
    return time.perf_counter() - began


def _record_again(path: Path, folder: Path) -> float:
    """Seconds that recording the events of a trace takes, and nothing else."""
    trace = read_rank(path)
    assert trace is not None
    header = trace.header
    setup = Setup(header.config, header.rank, header.world_size)
    names = {
        sample: name
        for line in trace.lines
        for sample, name in zip(_seqs(line.event), line.ids, strict=True)
    }
    moves = [start(setup, header.epoch)]
    for line in trace.lines[1:]:
        assert line.event is not None
        moves.append(transition(setup, moves[-1].state, line.event))
    file = TraceFolder(folder).open(setup, 0, header.divided)
    recorder = Recorder(file, lambda seqs: [names[seq] for seq in seqs])
    began = time.perf_counter()
    recorder.began(*moves[0])
    for line, move, before in zip(trace.lines[1:], moves[1:], moves, strict=False):
        for command in before.commands:
            recorder.performs(command)
        assert line.event is not None
        recorder.fed(line.event, *move)
    for command in moves[-1].commands:
        recorder.performs(command)
    recorder.ended()
    return time.perf_counter() - began


def _seqs(event: object) -> Sequence[int]:
    return [sample.seq for sample in getattr(event, "samples", ())]
