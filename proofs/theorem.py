"""What a theorem is, and the engine that all of them are proved with."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from model_check.paths import Engine
from model_check.prover import Obligation, Prover
from proofs import conduct, invariant, machine
from spec import (
    alignment,
    blocks,
    config,
    draw,
    enabled,
    exchange,
    grouping,
    quota,
    rank,
    samples,
    scaling,
    world,
)
from spec.variants import machines, rules


@dataclass(frozen=True)
class Theorem:
    """A promise, or part of one, for every number of ranks.

    promise: its name in the project. states: in plain English. assumes: what it rests on.
    reasoning: how the obligations add up to the statement. leaves_out: what it does not cover.
    """

    promise: str
    states: str
    assumes: str
    reasoning: str
    leaves_out: str
    obligations: tuple[Obligation, ...]


SPEC_MODULES: tuple[ModuleType, ...] = (
    alignment,
    blocks,
    config,
    draw,
    exchange,
    grouping,
    quota,
    rank,
    samples,
    scaling,
)
"""Where the functions live that the theorems are about."""

OTHER_MODULES: tuple[ModuleType, ...] = (
    machine,
    conduct,
    invariant,
    rules,
    machines,
    enabled,
    world,
)
"""Where what stands in for them lives, and the changed ones."""


def prover(*modules: ModuleType, timeout_ms: int = 20_000) -> Prover:
    """The prover for theorems of these modules (whose claims may use max, min, all and any)."""
    return Prover(
        Engine((*SPEC_MODULES, *OTHER_MODULES, *modules), timeout_ms=timeout_ms), timeout_ms
    )
