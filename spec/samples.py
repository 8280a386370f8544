"""What the protocol knows of a sample: its arrival number and what it costs. Never its content."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Sample(NamedTuple):
    """One sample as the protocol sees it.

    `seq` numbers the samples of one rank in the order in which they arrived, from 0, so it is the
    sample's name on that rank and also its age. `cost` is in tokens. `weight` is what the sample
    adds to the denominator of the loss (label tokens). `extras` are further costs, such as image
    patches, in the order of `Budget.extras`.
    """

    seq: int
    cost: int
    weight: int
    extras: tuple[int, ...] = ()


Group = tuple[Sample, ...]
"""The samples of one step on one rank, longest first. The empty group is an idle step."""


class Counts(NamedTuple):
    """What a step adds up to: on one rank, or (summed over ranks) everywhere."""

    samples: int
    tokens: int
    weight: int


NOTHING = Counts(0, 0, 0)


def counts_of(group: Group) -> Counts:
    """Samples, tokens and loss weight of a group."""
    return Counts(len(group), sum(s.cost for s in group), sum(s.weight for s in group))


def add_counts(a: Counts, b: Counts) -> Counts:
    """Field-wise sum: how the ranks' counts of one step become its totals."""
    return Counts(a.samples + b.samples, a.tokens + b.tokens, a.weight + b.weight)


def trainable(sample: Sample) -> bool:
    """Whether a sample takes part in training.

    A sample without tokens cannot be batched; one without loss weight adds nothing to any
    gradient, and a batch made only of such samples has a mean loss of 0/0. Both are filtered on
    arrival, so every group has a positive weight and every loss scale is defined.
    """
    return sample.cost > 0 and sample.weight > 0


def in_arrival_order(groups: Iterable[Group]) -> Group:
    """The samples of some groups, oldest first."""
    return tuple(sorted((s for group in groups for s in group), key=lambda s: s.seq))
