"""Quota mode stops at the first step at which the global quota is met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model_check.prover import Obligation, Source, both, either, implies
from proofs.theorem import Theorem
from spec import quota
from spec.config import Config
from spec.quota import Progress
from spec.samples import Counts


@dataclass(frozen=True)
class Closing:
    """The function that this theorem is about: one step of the fold that `take_steps` is."""

    advance: Callable[[Config, Progress, Counts], Progress] = quota.advance


@dataclass(frozen=True)
class Folding:
    """The fold itself, over a round of so many steps."""

    length: int
    take_steps: Callable[[Config, int, tuple[Counts, ...]], Progress] = quota.take_steps


SHIPPED = Closing()


class _SomeQuota:
    """A configuration with a quota of any size."""

    def __init__(self, source: Source) -> None:
        self.quota = source.int("quota")
        source.assume(self.quota >= 1)


class _Fold:
    """The fold before its next step: `looked_at` steps of the round are behind it, `before_last`
    samples had been delivered before the last of those that it took."""

    def __init__(self, source: Source) -> None:
        self.config: Any = _SomeQuota(source)
        self.looked_at, self.steps = source.int("looked at"), source.int("taken")
        self.start, self.delivered = source.int("delivered before"), source.int("delivered")
        self.before_last, samples = source.int("before the last"), source.int("samples of the step")
        source.assume(both(self.start >= 0, self.steps >= 0, samples >= 1))
        source.assume(self.invariant(self.looked_at, self.progress, self.before_last))
        self.total = Counts(samples, samples, samples)

    @property
    def progress(self) -> Progress:
        """What the fold has found so far."""
        return Progress(self.steps, self.delivered)

    def invariant(self, looked_at: Any, progress: Progress, before_last: Any) -> Any:
        """All steps so far are taken, or the quota is met; and it was not before the last one."""
        target = self.config.quota
        return both(
            progress.steps <= looked_at,
            either(progress.steps == looked_at, progress.delivered >= target),
            implies(progress.steps >= 1, before_last < target),
            implies(progress.steps == 0, progress.delivered == self.start),
            progress.delivered >= self.start,
        )


def _begins(source: Source, f: Closing) -> Callable[[], Any]:
    config: Any = _SomeQuota(source)
    start, samples = source.int("delivered before"), source.int("samples of the step")
    source.assume(both(start >= 0, samples >= 1))

    def claim() -> Any:
        after = f.advance(config, Progress(0, start), Counts(samples, samples, samples))
        taken, refused = after.steps == 1, after.steps == 0
        return either(both(taken, start < config.quota), both(refused, start >= config.quota))

    return claim


def _fold(source: Source, f: Closing) -> Callable[[], Any]:
    fold = _Fold(source)

    def claim() -> Any:
        before = fold.progress
        after = f.advance(fold.config, before, fold.total)
        took = after.steps == before.steps + 1
        last = before.delivered if took else fold.before_last
        return both(
            either(took, after.steps == before.steps),
            after.delivered == before.delivered + (fold.total.samples if took else 0),
            fold.invariant(fold.looked_at + 1, after, last),
        )

    return claim


def _overshoot(source: Source, f: Closing) -> Callable[[], Any]:
    fold = _Fold(source)
    source.assume(fold.delivered < fold.config.quota)

    def claim() -> Any:
        after = f.advance(fold.config, fold.progress, fold.total)
        short = after.delivered < fold.config.quota
        return either(short, after.delivered - fold.config.quota < fold.total.samples)

    return claim


def _whole_round(source: Source, f: Folding) -> Callable[[], Any]:
    config: Any = _SomeQuota(source)
    start = source.int("delivered before")
    source.assume(start >= 0)
    counts = [source.int(f"samples of step {i}") for i in range(f.length)]
    for count in counts:
        source.assume(count >= 1)
    totals = tuple(Counts(count, count, count) for count in counts)

    def claim() -> Any:
        steps, delivered = f.take_steps(config, start, totals)
        before = [start + sum(counts[:i]) for i in range(steps + 1)]
        while_open = both(*(b < config.quota for b in before[:-1]))
        closes = either(steps == len(totals), before[-1] >= config.quota)
        return both(while_open, closes, delivered == before[-1])

    return claim


def _begins_anew(config: Config, delivered: int, totals: tuple[Counts, ...]) -> Progress:
    """The quota counts from the start of each round."""
    return quota.take_steps(config, 0, totals)


def _takes_all(config: Config, delivered: int, totals: tuple[Counts, ...]) -> Progress:
    return Progress(len(totals), delivered + sum(total.samples for total in totals))


def _one_more(config: Config, progress: Progress, total: Counts) -> Progress:
    """Off by one: the step behind the one at which the quota is met is taken, too."""
    if config.quota is not None and progress.delivered > config.quota:
        return progress
    return Progress(progress.steps + 1, progress.delivered + total.samples)


def _never_met(config: Config, progress: Progress, total: Counts) -> Progress:
    return Progress(progress.steps + 1, progress.delivered + total.samples)


def _counts_double(config: Config, progress: Progress, total: Counts) -> Progress:
    after = quota.advance(config, progress, total)
    return Progress(after.steps, after.delivered + after.delivered - progress.delivered)


THEOREM = Theorem(
    promise="quota-closure",
    states=(
        "With a quota, the steps that a round of any length takes are those before which the quota "
        "is not met, and no others; so the epoch ends with the first step at which it is met, the "
        "same on all ranks, and overshoots by less than that step's samples."
    ),
    assumes="Every step has at least one sample on some rank. Totals are the same on all ranks.",
    reasoning=(
        "`take_steps` folds `advance` over the totals of the round (run for 0 to 3 of them). By "
        "induction over the fold: "
        "either every step so far is taken or the quota is met, the quota was not met before the "
        "last step taken, and `delivered` is what the steps taken add up to. It goes on with the "
        "next round; once the quota is met a rank wants no step."
    ),
    leaves_out="Trimming the last step to the exact quota: the loader does not offer it.",
    obligations=(
        Obligation(
            "first step",
            "the first step of a round is taken exactly if the quota is not met before it",
            _begins,
            SHIPPED,
            {"one step more": Closing(_one_more), "the quota is never met": Closing(_never_met)},
        ),
        Obligation(
            "fold",
            "one step more: it is taken exactly if the quota is not met, and so are all before it",
            _fold,
            SHIPPED,
            {
                "one step more": Closing(_one_more),
                "the quota is never met": Closing(_never_met),
                "samples count twice": Closing(_counts_double),
            },
        ),
        Obligation(
            "overshoot",
            "fewer samples too many than the last step holds",
            _overshoot,
            SHIPPED,
            {"samples count twice": Closing(_counts_double)},
        ),
        *(
            Obligation(
                f"round ({length} steps)",
                "`take_steps` is that fold, from what was delivered before",
                _whole_round,
                Folding(length),
                {"each round begins anew": Folding(length, _begins_anew)}
                | ({"all steps are taken": Folding(length, _takes_all)} if length else {}),
            )
            for length in range(4)
        ),
    ),
)
