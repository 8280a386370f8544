"""Groups stay within the budget: while they are formed, and when they are split or carried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from model_check.prover import Obligation, Source, both
from proofs.theorem import Theorem
from spec import grouping
from spec.config import Budget, CostRule
from spec.grouping import Load
from spec.samples import Sample


@dataclass(frozen=True)
class Grouping:
    """The functions that this theorem is about, under one cost rule, padding to one multiple."""

    rule: CostRule = CostRule.PADDED
    multiple: int = 1
    place: Callable[[Budget, Load | None, Sample], tuple[Load, bool]] = grouping.place
    within: Callable[[Budget, Load], bool] = grouping.within
    padded_length: Callable[[Budget, int], int] = grouping.padded_length


SHIPPED = Grouping()

MULTIPLES = (1, 8, 64, 128)
"""Lengths that rows are padded to multiples of. (Division is symbolic by a plain number only.)"""


class _SomeBudget:
    """A budget of any size. (`Budget` itself checks that its numbers are plain integers.)"""

    def __init__(self, source: Source, f: Grouping) -> None:
        self.tokens, self.max_samples = source.int("tokens"), source.int("max_samples")
        self.rule, self.multiple = f.rule, f.multiple
        self.extras = (source.int("resource budget"),)
        for limit in (self.tokens, self.max_samples, *self.extras):
            source.assume(limit >= 1)


def _some_load(source: Source, name: str) -> Load:
    load = Load(
        source.int(f"{name}.rows"),
        source.int(f"{name}.longest"),
        source.int(f"{name}.summed"),
        (source.int(f"{name}.resource"),),
    )
    source.assume(both(load.rows >= 1, load.longest >= 1, load.summed >= 1, load.extras[0] >= 0))
    return load


def _some_sample(source: Source) -> Sample:
    cost, resource = source.int("cost"), source.int("resource")
    source.assume(both(cost >= 1, resource >= 0))
    return Sample(0, cost, cost, (resource,))


def _first(source: Source, f: Grouping) -> Callable[[], Any]:
    budget: Any = _SomeBudget(source, f)
    sample = _some_sample(source)

    def claim() -> Any:
        after, begins = f.place(budget, None, sample)
        return both(begins, grouping.within(budget, after))

    return claim


def _fold(source: Source, f: Grouping) -> Callable[[], Any]:
    budget: Any = _SomeBudget(source, f)
    load, sample = _some_load(source, "load"), _some_sample(source)

    def claim() -> Any:
        if not grouping.within(budget, load):
            return True  # no group that the fold has formed
        after, _ = f.place(budget, load, sample)
        return grouping.within(budget, after)

    return claim


def _full(source: Source, f: Grouping) -> Callable[[], Any]:
    budget: Any = _SomeBudget(source, f)
    load, sample = _some_load(source, "load"), _some_sample(source)

    def claim() -> Any:
        _, begins = f.place(budget, load, sample)
        return not begins or not grouping.within(budget, grouping.add(load, sample))

    return claim


def _part(source: Source, f: Grouping) -> Callable[[], Any]:
    budget: Any = _SomeBudget(source, f)
    whole, part = _some_load(source, "whole"), _some_load(source, "part")
    for smaller, larger in zip(part[:3], whole[:3], strict=True):
        source.assume(smaller <= larger)
    source.assume(part.extras[0] <= whole.extras[0])
    return lambda: not f.within(budget, whole) or f.within(budget, part)


def _padding(source: Source, f: Grouping) -> Callable[[], Any]:
    budget: Any = _SomeBudget(source, f)
    short, long = source.int("short"), source.int("long")
    source.assume(both(short >= 1, short <= long))

    def claim() -> Any:
        padded, more = f.padded_length(budget, short), f.padded_length(budget, long)
        enough = both(padded >= short, padded < short + f.multiple, padded % f.multiple == 0)
        return both(enough, padded <= more)

    return claim


def _always_joins(budget: Budget, load: Load | None, sample: Sample) -> tuple[Load, bool]:
    if load is None:
        return grouping.load_of(sample), True
    return grouping.add(load, sample), False


def _always_begins(budget: Budget, load: Load | None, sample: Sample) -> tuple[Load, bool]:
    return grouping.load_of(sample), True


def _never_begins(budget: Budget, load: Load | None, sample: Sample) -> tuple[Load, bool]:
    return grouping.load_of(sample), False


def _looks_before_adding(budget: Budget, load: Load | None, sample: Sample) -> tuple[Load, bool]:
    if load is not None and grouping.within(budget, load):
        return grouping.add(load, sample), False
    return grouping.load_of(sample), True


def _not_of_two(budget: Budget, load: Load) -> bool:
    """A limit from below: part of a group may then be refused."""
    return grouping.within(budget, load) and (load.rows == 1 or load.rows >= 3)


def _rounds_down(budget: Budget, longest: int) -> int:
    return longest // budget.multiple * budget.multiple


def _under_every_rule(
    name: str,
    says: str,
    body: Any,
    mutants: dict[str, Any],
    multiples: tuple[int, ...] = MULTIPLES,
) -> list[Obligation]:
    found = []
    for rule, multiple in ((CostRule.SUMMED, 1), *((CostRule.PADDED, m) for m in multiples)):
        changed = {
            label: replace(mutant, rule=rule, multiple=multiple)
            for label, mutant in mutants.items()
        }
        label = f"{name} ({rule.name.lower()}{f' to {multiple}' if multiple > 1 else ''})"
        found.append(Obligation(label, says, body, Grouping(rule, multiple), changed))
    return found


THEOREM = Theorem(
    promise="budget",
    states=(
        "For any budget and any number of samples of any costs, a group of two or more samples is "
        "within the budget, in tokens, in samples and in a further resource; and no group is left "
        "short that could take the next sample. Splitting and carrying keep this."
    ),
    assumes="Costs and budgets of at least 1. Rows are padded to a multiple of 1, 8, 64 or 128.",
    reasoning=(
        "Grouping is a fold of `place` over the samples. The first sample makes a group that is "
        "within the budget (alone, whatever it costs); each further step keeps a group within it "
        "or begins one. A part of a group weighs no more than the group, and whole groups are "
        "carried. A group's cost depends on its longest sample through the padded length alone, "
        "which is never less for a longer sample."
    ),
    leaves_out=(
        "Other multiples, and several further resources at once (the function treats each alike): "
        "tested with random budgets. The order: `sorted` puts the longest sample first."
    ),
    obligations=(
        *_under_every_rule(
            "first",
            "the first sample begins a group that is within the budget",
            _first,
            {"nothing begins": replace(SHIPPED, place=_never_begins)},
        ),
        *_under_every_rule(
            "fold",
            "a group that is within the budget still is after one more sample has been placed",
            _fold,
            {
                "every sample joins": replace(SHIPPED, place=_always_joins),
                "looks before it adds": replace(SHIPPED, place=_looks_before_adding),
            },
        ),
        *_under_every_rule(
            "full",
            "a sample begins a new group only if it would exceed a budget",
            _full,
            {"every sample begins a group": replace(SHIPPED, place=_always_begins)},
        ),
        *_under_every_rule(
            "part",
            "what is part of a group within the budget is within the budget",
            _part,
            {"two are refused where three are not": replace(SHIPPED, within=_not_of_two)},
            multiples=(1,),
        ),
        *(
            Obligation(
                f"padding (to {multiple})",
                "the padded length is enough, a multiple, and never less for a longer sample",
                _padding,
                Grouping(multiple=multiple),
                {"rounds down": Grouping(multiple=multiple, padded_length=_rounds_down)},
            )
            for multiple in MULTIPLES
            if multiple > 1
        ),
    ),
)
