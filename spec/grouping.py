"""Forms groups within the budget: a fold over the samples, longest first.

Sorting puts samples of similar length side by side, so little is padded. Going from the longest
down makes the first sample of a group its padded length, so that a group is full exactly when one
more sample would exceed the budget: no group is left short without a reason, the longest included.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spec.config import Budget, CostRule
from spec.samples import Group, Sample


class Load(NamedTuple):
    """What a group weighs so far."""

    rows: int
    longest: int
    summed: int
    extras: tuple[int, ...]


def load_of(sample: Sample) -> Load:
    """The load of a group that holds one sample."""
    return Load(1, sample.cost, sample.cost, sample.extras)


def add(load: Load, sample: Sample) -> Load:
    """The load after one more sample."""
    return Load(
        load.rows + 1,
        max(load.longest, sample.cost),
        load.summed + sample.cost,
        tuple(have + more for have, more in zip(load.extras, sample.extras, strict=True)),
    )


def batch_cost(budget: Budget, load: Load) -> int:
    """Tokens of the batch that this load becomes: rows times padded length, or the plain sum."""
    if budget.rule is CostRule.SUMMED:
        return load.summed
    return load.rows * padded_length(budget, load.longest)


def padded_length(budget: Budget, longest: int) -> int:
    """The length to which a batch is padded whose longest sample has this length."""
    return -(-longest // budget.multiple) * budget.multiple


def within(budget: Budget, load: Load) -> bool:
    """Whether a group may be emitted (promise: budget): within every limit, or one sample alone."""
    if load.rows == 1:
        return True
    if budget.max_samples is not None and load.rows > budget.max_samples:
        return False
    if batch_cost(budget, load) > budget.tokens:
        return False
    return all(have <= limit for have, limit in zip(load.extras, budget.extras, strict=True))


def by_length(sample: Sample) -> tuple[int, int]:
    """Sort key: longest first, among equals the oldest first."""
    return (-sample.cost, sample.seq)


def group(budget: Budget, samples: Iterable[Sample]) -> tuple[Group, ...]:
    """Partition samples into groups, longest first, each as full as its next neighbour allows."""
    groups: list[list[Sample]] = []
    load: Load | None = None
    for sample in sorted(samples, key=by_length):
        load, begins = place(budget, load, sample)
        if begins:
            groups.append([])
        groups[-1].append(sample)
    return tuple(map(tuple, groups))


def place(budget: Budget, load: Load | None, sample: Sample) -> tuple[Load, bool]:
    """One step of the grouping: the load of the group that takes the sample, and whether it is a
    new one (there is none yet, or the sample would exceed a budget)."""
    if load is not None:
        grown = add(load, sample)
        if within(budget, grown):
            return grown, False
    return load_of(sample), True


def load_of_group(group_: Group) -> Load:
    """The load of a whole group (which must not be empty)."""
    load = load_of(group_[0])
    for sample in group_[1:]:
        load = add(load, sample)
    return load


def oversize(budget: Budget, sample: Sample) -> bool:
    """Whether a sample exceeds a budget all by itself, so that it has to travel alone."""
    if batch_cost(budget, load_of(sample)) > budget.tokens:
        return True
    return any(have > limit for have, limit in zip(sample.extras, budget.extras, strict=True))
