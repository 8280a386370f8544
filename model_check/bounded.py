"""Bounded model checking: whole epochs of two and three ranks, unrolled, for all costs at once.

`spec.lockstep.run_epoch` is run on symbolic samples: how many there are on each rank (up to a few),
what they cost, the token budget and the quota are all open. Every path through the epoch is taken,
and every promise is asked on each. It sees what exploration cannot, all costs and budgets; and it
does not see what exploration does, other orders, faults and stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from model_check import promises
from model_check.closed import ClosedSystem
from model_check.explorer import Limits, Verdict, explore
from model_check.paths import Engine
from model_check.profiles import Case, for_mutants
from model_check.promises import PROMISES, Epoch
from model_check.prover import Obligation, Parts, Proof, ProofResult, Prover, Source, both
from spec import (
    alignment,
    blocks,
    config,
    draw,
    exchange,
    grouping,
    lockstep,
    quota,
    rank,
    samples,
    scaling,
)
from spec.config import CostRule, Idle, Mode
from spec.errors import ODBError
from spec.lockstep import Play, run_epoch
from spec.rank import Rules
from spec.samples import Sample
from spec.variants import VARIANTS, Variant, machines, rules
from spec.world import FAITHFUL, Stop

MODULES = (
    alignment, blocks, config, draw, exchange, grouping, lockstep, quota, rank, samples, scaling,
    promises, rules, machines,
)  # fmt: skip


@dataclass(frozen=True)
class Scope:
    """What is unrolled: up to `samples` on each of `ranks`, windows of `window`, one mode, and
    blocks of `block` steps."""

    ranks: int
    samples: int
    window: int
    mode: Mode
    idle: Idle = Idle.PAD
    has_quota: bool = False
    block: int = 1
    play: Play = lockstep.SHIPPED

    @property
    def name(self) -> str:
        """As it is called in tables."""
        idle = f", idle {self.idle.name.lower()}" if self.mode is Mode.JOIN else ""
        quota = ", any quota" if self.has_quota else ""
        mode = "join" if self.mode is Mode.JOIN else "quota mode"
        blocks_ = f", blocks of {self.block}" if self.block > 1 else ""
        return f"{mode}{idle}{quota}: window {self.window}{blocks_}"


@dataclass(frozen=True)
class AnyBudget:
    """A budget of any number of tokens. (`Budget` itself checks that they are plain integers.)"""

    tokens: Any
    rule: CostRule = CostRule.PADDED
    max_samples: None = None
    extras: tuple[int, ...] = ()
    multiple: int = 1


ENDINGS = (
    {"mode": Mode.JOIN},
    {"mode": Mode.JOIN, "idle": Idle.STOP},
    {"mode": Mode.QUOTA},
    {"mode": Mode.QUOTA, "has_quota": True},
)


SMALL = ((1, 3, 2), (2, 2, 1), (2, 2, 2), (2, 2, 3), (3, 1, 1))
LARGE = (*SMALL, (2, 3, 2), (3, 2, 2))
FOR_VARIANTS = ((2, 2, 1), (1, 3, 2), (2, 2, 3))
"""Ranks, samples on each, window."""


def scopes(sizes: Sequence[tuple[int, int, int]] = SMALL) -> list[Scope]:
    """What is unrolled: every mode in every size, small ones first; then join mode with blocks."""
    every = [
        Scope(ranks, most, window, **ending) for ranks, most, window in sizes for ending in ENDINGS
    ]
    with_blocks = [
        Scope(ranks, most, window, Mode.JOIN, block=2) for ranks, most, window in sizes if most > 1
    ]
    return [*every, *with_blocks]


def _epoch(source: Source, scope: Scope) -> Callable[[], Any]:
    tokens, quota_ = source.int("token budget"), source.int("quota")
    source.assume(both(tokens >= 1, quota_ >= 1))
    counts, shards = [], []
    for r in range(scope.ranks):
        count = source.int(f"samples on rank {r}")
        source.assume(both(count >= 0, count <= scope.samples))
        costs = [source.int(f"cost of sample {i} on rank {r}") for i in range(scope.samples)]
        for cost in costs:
            source.assume(cost >= 0)
        counts.append(count)
        shards.append(tuple(Sample(i, cost, 1) for i, cost in enumerate(costs)))
    settings: Any = SimpleNamespace(
        budget=AnyBudget(tokens),
        window=scope.window,
        slow_start=scope.window,
        mode=scope.mode,
        idle=scope.idle,
        quota=quota_ if scope.has_quota else None,
        seed=0,
        settings=0,
        accumulation_steps=scope.block,
    )
    # The bound of bounded-termination, and one round more, in which it would be broken.
    play = replace(scope.play, rounds=scope.samples + 2 + (scope.block > 1))

    def claim() -> Any:
        there = [_first(count, shard) for count, shard in zip(counts, shards, strict=True)]
        try:
            record = run_epoch(settings, there, play)
        except ODBError:
            return Parts(step_alignment=False)
        epoch = Epoch(settings, there, record)
        found = {name: promise(epoch) for name, promise in PROMISES.items()}
        return Parts(**{name.replace("-", "_"): text is None for name, text in found.items()})

    return claim


def _first(count: Any, shard: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """So many samples of a shard."""
    for size in range(len(shard)):
        if count == size:
            return shard[:size]
    return shard


def obligation(scope: Scope) -> Obligation:
    """That every promise holds of every epoch of a scope."""
    return Obligation(scope.name, "every promise holds of every epoch", _epoch, scope)


PROVER = Prover(Engine(MODULES))


def check(scope: Scope) -> ProofResult:
    """Check the protocol in one scope. PROVED: within its bounds."""
    return PROVER.prove(obligation(scope))


# ---------------------------------------------------------------- the same variants as the explorer


@dataclass(frozen=True)
class Comparison:
    """Whether a variant falls here, and whether it falls for the explorer in worlds that have what
    is here: no faults, no early stops, one epoch, the loader's own habits."""

    name: str
    scope: Scope | None
    found: ProofResult | None
    explorer: str | None
    seconds: float

    @property
    def agree(self) -> bool:
        """Whether both say the same."""
        return (self.found is None) == (self.explorer is None)


def comparable() -> Mapping[str, Variant]:
    """The variants that change what is here at all: rules or the machine."""
    return {name: v for name, v in VARIANTS.items() if v.habits == FAITHFUL}


def plain_cases() -> list[Case]:
    """The explorer's worlds for variants, without what is not here."""
    return [
        case
        for case in for_mutants()
        if not case.world.faults.most and case.world.stop is Stop.NEVER and case.world.epochs == 1
    ]


def compare(name: str) -> Comparison:
    """Look for a counterexample of a variant in both ways."""
    variant = VARIANTS[name]
    began = time.perf_counter()
    play = Play(variant.rules or Rules(), variant.machine)
    falls: tuple[Scope, ProofResult] | None = None
    for scope in scopes(FOR_VARIANTS):
        about = replace(scope, play=play)
        found = PROVER.refute(obligation(scope), about)
        if found.proof is Proof.REFUTED:
            falls = (scope, found)
            break
    explorer = _explored(variant, plain_cases())
    scope_, result = falls if falls is not None else (None, None)
    return Comparison(name, scope_, result, explorer, time.perf_counter() - began)


def _explored(variant: Variant, cases: Sequence[Case]) -> str | None:
    for case in cases:
        system = ClosedSystem(variant.within(case.world))
        found = explore(system, system.question(), Limits(states=400_000))
        if found.verdict is Verdict.REFUTED and found.violation is not None:
            return found.violation.promise
    return None
