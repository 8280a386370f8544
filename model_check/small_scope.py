"""Runs every epoch of a small scope, and judges each by every promise.

The scope: all shards of up to a few samples of four kinds (filtered, short, long, above the budget)
on two and three ranks, in every mode. It is exhaustive in what ranks may hold; the order in which
ranks act is that of `spec.lockstep`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from model_check.promises import PROMISES, Epoch, violations
from spec.config import Budget, Config, Idle, Mode
from spec.errors import ODBError
from spec.lockstep import Play, run_epoch
from spec.rank import Rules
from spec.samples import Sample

KINDS = (0, 1, 2, 5)
"""Costs in tokens, for a budget of 3: filtered, short, long, oversize."""

BUDGET = Budget(3)


@dataclass(frozen=True)
class Scope:
    """All shards of up to `longest` samples on each of `world_size` ranks."""

    world_size: int
    longest: int


DEFAULT_SCOPES = (Scope(2, 2), Scope(3, 1))


@dataclass(frozen=True)
class SmallScopeResult:
    """What was run and found. `counterexample` is the smallest epoch that broke a promise."""

    epochs: int
    seconds: float
    scopes: tuple[Scope, ...]
    counterexample: str | None

    @property
    def holds(self) -> bool:
        """Whether every epoch kept every promise."""
        return self.counterexample is None

    def __str__(self) -> str:
        scope = ", ".join(
            f"{s.world_size} ranks with up to {s.longest} samples" for s in self.scopes
        )
        if self.counterexample is not None:
            return f"small scope: BROKEN after {self.epochs} epochs: {self.counterexample}"
        return (
            f"small scope: all {self.epochs:,} epochs of {scope} keep {len(PROMISES)} promises "
            f"({self.seconds:.1f} s; one schedule each)"
        )


def configs() -> Iterator[Config]:
    """The configurations of the scope: every mode, windows smaller and larger than a shard."""
    for window in (1, 2, 4):
        yield Config(BUDGET, window, slow_start=1)
        yield Config(BUDGET, window, slow_start=window, idle=Idle.STOP)
        yield Config(BUDGET, window, slow_start=window, mode=Mode.QUOTA)
        yield Config(BUDGET, window, slow_start=window, mode=Mode.QUOTA, quota=2)


def shards_of(scope: Scope) -> Iterator[tuple[tuple[Sample, ...], ...]]:
    """Every way to fill the ranks, smallest first."""
    shards = [
        tuple(Sample(i, cost, cost) for i, cost in enumerate(costs))
        for count in range(scope.longest + 1)
        for costs in product(KINDS, repeat=count)
    ]
    everything = product(shards, repeat=scope.world_size)
    return iter(sorted(everything, key=lambda ranks: sum(map(len, ranks))))


def check(
    progress: Callable[[int, int], None] | None = None,
    scopes: Sequence[Scope] = DEFAULT_SCOPES,
    rules: Rules | None = None,
) -> SmallScopeResult:
    """Run and judge every epoch of the scopes; stop at the first that breaks a promise.

    `progress(done, total)` is called now and then. `rules` replaces parts of the protocol.
    """
    began = time.perf_counter()
    work = [(config, ranks) for s in scopes for ranks in shards_of(s) for config in configs()]
    counterexample: str | None = None
    done = 0
    for config, ranks in work:
        counterexample = _judge(config, ranks, rules)
        done += 1
        if progress is not None and done % 200 == 0:
            progress(done, len(work))
        if counterexample is not None:
            break
    return SmallScopeResult(done, time.perf_counter() - began, tuple(scopes), counterexample)


def _judge(config: Config, shards: Sequence[Sequence[Sample]], rules: Rules | None) -> str | None:
    try:
        record = run_epoch(config, shards, Play(rules or Rules()))
        broken = violations(Epoch(config, shards, record))
    except ODBError as error:
        broken = {"step-alignment": f"{type(error).__name__}: {error}"}
    if not broken:
        return None
    costs = [[s.cost for s in shard] for shard in shards]
    what = "; ".join(f"{name}: {text}" for name, text in broken.items())
    return f"costs {costs}, window {config.window}, {config.mode.name} mode: {what}"
