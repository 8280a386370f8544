"""The cost of one alignment round: both exchanges between local ranks, nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from statistics import median, quantiles

from odb.errors import ConfigError
from odb.interpreter import COUNT_FIELDS
from odb.testing import run_ranks
from odb.transport import Transport, connect
from spec.config import Budget, Config, Place, terms_of
from spec.exchange import Report, decode, encode, tally_of
from spec.samples import Counts


@dataclass(frozen=True)
class RoundBench:
    """What is measured: `rounds` rounds of `steps` steps each (T), on `ranks` local ranks."""

    ranks: int = 2
    steps: int = 32
    rounds: int = 300
    warm_up: int = 20
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if min(self.ranks, self.steps) < 1 or self.rounds < 2:
            raise ConfigError(
                "ranks and steps must be 1 or more and rounds 2 or more, not "
                f"{self.ranks}, {self.steps} and {self.rounds}"
            )


@dataclass(frozen=True)
class RoundResult:
    """Milliseconds of a round on the slowest rank: the median, and what 95 % stay under."""

    ranks: int
    steps: int
    median_ms: float
    p95_ms: float
    all_ms: tuple[float, ...]


def bench_rounds(bench: RoundBench) -> RoundResult:
    """Run the benchmark in processes of its own. Raises odb.testing.RankError if a rank fails."""
    per_rank = run_ranks(
        _measure_rank, bench.ranks, bench, start_method="fork", timeout=bench.timeout
    )
    slowest = tuple(1000 * max(times) for times in zip(*per_rank, strict=True))
    return RoundResult(
        ranks=bench.ranks,
        steps=bench.steps,
        median_ms=median(slowest),
        p95_ms=quantiles(slowest, n=20)[-1],
        all_ms=slowest,
    )


def _measure_rank(rank: int, world_size: int, bench: RoundBench) -> list[float]:
    config = Config(Budget(tokens=16_384))
    counts = [Counts(8, 2400, 2400)] * bench.steps
    times: list[float] = []
    with closing(connect("world", bench.timeout)) as transport:
        for number in range(bench.warm_up + bench.rounds):
            report = Report(
                terms=terms_of(config, Place(0, number, number * bench.steps)),
                want=bench.steps,
                limit=config.window,
                has_spare=True,
                waiting=False,
                failed=False,
                closed=False,
            )
            start = time.perf_counter()
            _exchange(transport, report, counts)
            times.append(time.perf_counter() - start)
    return times[bench.warm_up :]


def _exchange(transport: Transport, report: Report, counts: Sequence[Counts]) -> None:
    """What a rank does between its report and the numbering of its steps (see
    `odb.interpreter.Interpreter`), without the decision and the alignment."""
    seat = transport.seat
    decode(transport.maximum(encode(tally_of(report, seat.rank, seat.world_size))))
    flat = transport.total(tuple(chain.from_iterable(counts)))
    for i in range(0, len(flat), COUNT_FIELDS):
        Counts(*flat[i : i + COUNT_FIELDS])
