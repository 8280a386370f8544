"""Puts every variant of the protocol into small worlds, and expects it to fall."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from model_check.closed import ClosedSystem, Key
from model_check.explorer import Limits, Verdict, Violation, explore
from model_check.profiles import Case, for_mutants
from spec.variants import VARIANTS, Variant
from spec.world import Action


@dataclass(frozen=True)
class Fall:
    """How a variant fell: in which world, and by which shortest run."""

    case: Case
    system: ClosedSystem
    violation: Violation[Key, Action]


@dataclass(frozen=True)
class MutantResult:
    """What became of a variant. `fall` is None if it survived every world."""

    name: str
    variant: Variant
    fall: Fall | None
    worlds: int
    seconds: float

    @property
    def as_expected(self) -> bool:
        """Whether it fell, and by a promise that it was said to break."""
        return self.fall is not None and self.fall.violation.promise in self.variant.falls


def judge(name: str, variant: Variant, cases: Sequence[Case]) -> MutantResult:
    """Explore a variant in one world after the other, up to the first in which it breaks a promise
    that it is said to break (or, if there is none, any promise)."""
    began = time.perf_counter()
    other: Fall | None = None
    for number, case in enumerate(cases, start=1):
        system = ClosedSystem(variant.within(case.world))
        found = explore(system, system.question(), Limits(states=400_000))
        if found.verdict is Verdict.REFUTED and found.violation is not None:
            fall = Fall(case, system, found.violation)
            if found.violation.promise in variant.falls:
                return MutantResult(name, variant, fall, number, time.perf_counter() - began)
            other = other or fall
    return MutantResult(name, variant, other, len(cases), time.perf_counter() - began)


def judge_all(
    variants: Mapping[str, Variant] | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[MutantResult]:
    """Judge every variant. `progress(name)` is called before each."""
    cases = for_mutants()
    results = []
    for name, variant in (variants or VARIANTS).items():
        if progress is not None:
            progress(name)
        results.append(judge(name, variant, cases))
    return results
