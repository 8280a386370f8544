"""Quota mode stops at the first step at which the global quota is met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model_check.prover import Obligation, Source, both, either
from proofs.theorem import Theorem
from spec import rank
from spec.config import Config
from spec.samples import Counts


@dataclass(frozen=True)
class Closing:
    """The function that this theorem is about, for a round of some number of steps."""

    length: int = 0
    steps_until_quota: Callable[[Config, int, tuple[Counts, ...]], int] = rank.steps_until_quota


LONGEST = 6
"""Rounds of up to this many steps are unrolled."""


class _SomeQuota:
    """A configuration with a quota of any size."""

    def __init__(self, source: Source) -> None:
        self.quota = source.int("quota")
        source.assume(self.quota >= 1)


def _round(source: Source, f: Closing) -> tuple[Any, Any, tuple[Counts, ...]]:
    config: Any = _SomeQuota(source)
    delivered = source.int("delivered before")
    source.assume(delivered >= 0)
    samples = [source.int(f"samples of step {i}") for i in range(f.length)]
    for count in samples:
        source.assume(count >= 1)
    return config, delivered, tuple(Counts(count, count, count) for count in samples)


def _first_step(source: Source, f: Closing) -> Callable[[], Any]:
    config, delivered, totals = _round(source, f)

    def claim() -> Any:
        count = f.steps_until_quota(config, delivered, totals)
        before = [delivered + sum(t.samples for t in totals[:i]) for i in range(count + 1)]
        open_before_each = both(*(b < config.quota for b in before[:-1]))
        return both(open_before_each, either(count == len(totals), before[-1] >= config.quota))

    return claim


def _overshoot(source: Source, f: Closing) -> Callable[[], Any]:
    config, delivered, totals = _round(source, f)
    source.assume(delivered < config.quota)

    def claim() -> Any:
        count = f.steps_until_quota(config, delivered, totals)
        after = delivered + sum(t.samples for t in totals[:count])
        last = totals[count - 1].samples if count else 0
        return either(after < config.quota, after - config.quota < last)

    return claim


def _one_more(config: Config, delivered: int, totals: tuple[Counts, ...]) -> int:
    return min(len(totals), rank.steps_until_quota(config, delivered, totals) + 1)


def _never_met(config: Config, delivered: int, totals: tuple[Counts, ...]) -> int:
    return len(totals)


def _for_every_length(name: str, says: str, body: Any) -> list[Obligation]:
    obligations = []
    for length in range(1, LONGEST + 1):
        mutants = {"the quota is never met": Closing(length, _never_met)}
        if length > 1:
            mutants["one step more"] = Closing(length, _one_more)
        elif name == "overshoot":
            mutants = {}  # one step, before which the quota is open, is always right
        obligations.append(
            Obligation(f"{name} ({length} steps)", says, body, Closing(length), mutants)
        )
    return obligations


THEOREM = Theorem(
    promise="quota-closure",
    states=(
        "With a quota, the steps that a round takes are those before which the quota is not met, "
        "and no others; so the epoch ends with the first step at which it is met, the same on all "
        "ranks, and overshoots by less than that step's samples."
    ),
    assumes="Every step has at least one sample on some rank. Totals are the same on all ranks.",
    reasoning=(
        "Both statements hold of a round for any quota, any number delivered before, and any "
        "samples in each step. `delivered` is then the sum over the steps taken, so the next round "
        "begins where this one ended; once the quota is met a rank wants no step."
    ),
    leaves_out=f"Rounds of more than {LONGEST} steps: the loop is unrolled, not done by induction.",
    obligations=(
        *_for_every_length(
            "first step", "steps are taken exactly while the quota is not met", _first_step
        ),
        *_for_every_length(
            "overshoot", "fewer samples too many than the last step holds", _overshoot
        ),
    ),
)
