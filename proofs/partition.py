"""Grouping and aligning only move samples: all come out, once, in groups that are not empty, and
nothing that is carried is older than the oldest that leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from model_check.prover import Obligation, Parts, Source, both
from proofs.theorem import Theorem
from spec import alignment, grouping
from spec.alignment import Alignment
from spec.config import Budget, CostRule
from spec.grouping import load_of_group
from spec.samples import Group, Sample
from spec.variants import rules


@dataclass(frozen=True)
class Moves:
    """The functions that this theorem is about, for groups of these sizes and a target."""

    sizes: tuple[int, ...]
    target: int = 1
    group: Callable[[Budget, tuple[Sample, ...]], tuple[Group, ...]] = grouping.group
    align: Callable[[tuple[Group, ...], int], Alignment] = alignment.align


class _SomeBudget:
    """A budget of any number of tokens. (The limits of `proofs.budget` are no matter here.)"""

    rule, multiple, extras = CostRule.PADDED, 1, ()
    max_samples = None

    def __init__(self, source: Source) -> None:
        self.tokens = source.int("tokens")
        source.assume(self.tokens >= 1)


def some_samples_of(source: Source, count: int) -> tuple[Sample, ...]:
    """Samples of any costs, numbered in any order."""
    samples: list[Sample] = []
    for i in range(count):
        cost, seq = source.int(f"cost {i}"), source.int(f"seq {i}")
        source.assume(both(cost >= 1, seq >= 0, *(seq != s.seq for s in samples)))
        samples.append(Sample(seq, cost, cost))
    return tuple(samples)


def as_groups(samples: tuple[Sample, ...], sizes: tuple[int, ...]) -> tuple[Group, ...]:
    """The samples in groups of these sizes."""
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(samples[b : b + size] for b, size in zip(begins, sizes, strict=True))


def _same(before: tuple[Sample, ...], after: tuple[Group, ...]) -> bool:
    """Whether exactly these samples are in the groups. (They are told apart as objects.)"""
    out = [id(s) for group in after for s in group]
    return sorted(out) == sorted(id(s) for s in before)


def _groups_all(source: Source, f: Moves) -> Callable[[], Any]:
    budget: Any = _SomeBudget(source)
    samples = some_samples_of(source, f.sizes[0])

    def claim() -> Any:
        groups = f.group(budget, samples)
        full = bool(groups) and all(bool(group) for group in groups)
        return Parts(
            identity_coverage=_same(samples, groups) and full,
            budget=both(*(grouping.within(budget, load_of_group(g)) for g in groups if g)),
        )

    return claim


def _aligns_all(source: Source, f: Moves) -> Callable[[], Any]:
    samples = some_samples_of(source, sum(f.sizes))
    groups = as_groups(samples, f.sizes)

    def claim() -> Any:
        kept, carried = f.align(groups, f.target)
        left = [s.seq for group in kept for s in group]
        return Parts(
            identity_coverage=_same(samples, (*kept, carried)),
            alignment_succeeds=both(len(kept) == f.target, *(bool(group) for group in kept)),
            bounded_delay=both(*(min(left) < s.seq for s in carried)) if left else True,
        )

    return claim


LARGEST = 3
"""Samples of a window that is grouped, and groups that are aligned."""

SHAPES = tuple(
    sizes for count in (1, 2, 3) for sizes in product((1, 2, 3), repeat=count) if sum(sizes) <= 4
)
"""Sizes of the groups before alignment: up to three groups, four samples in all."""


def _one_token_more(budget: Budget, samples: tuple[Sample, ...]) -> tuple[Group, ...]:
    more: Any = _SomeBudget.__new__(_SomeBudget)
    more.tokens = budget.tokens + 1
    return grouping.group(more, samples)


def _grouping() -> Iterator[Obligation]:
    for count in range(1, LARGEST + 1):
        mutants = {"nothing is grouped": Moves((count,), group=lambda budget, samples: ())}
        if count > 1:
            mutants["the last group is dropped"] = Moves((count,), group=rules.drop_last_group)
            mutants["one token more"] = Moves((count,), group=_one_token_more)
        yield Obligation(
            f"group ({count} samples)",
            "groups hold exactly the samples of the window, and none is empty",
            _groups_all,
            Moves((count,)),
            mutants,
        )


def _aligning() -> Iterator[Obligation]:
    for sizes in SHAPES:
        for target in range(1, sum(sizes) + 1):
            mutants = {"a sample is there twice": Moves(sizes, target, align=rules.deliver_twice)}
            if target < len(sizes):
                mutants["the carry is dropped"] = Moves(sizes, target, align=rules.drop_carry)
                mutants["the oldest wait"] = Moves(sizes, target, align=rules.carry_oldest)
            if target > len(sizes):
                mutants["nothing is split"] = Moves(sizes, target, align=rules.do_not_split)
            yield Obligation(
                f"align (groups of {', '.join(map(str, sizes))} to {target})",
                "exactly T groups, none empty; what is not in them is carried; the oldest leaves",
                _aligns_all,
                Moves(sizes, target),
                mutants,
            )


THEOREM = Theorem(
    promise="partition",
    states=(
        "Grouping and aligning neither lose nor double a sample, whatever the samples cost and "
        "however they are numbered; no group is empty; alignment gives exactly T groups, and the "
        "oldest sample is in one of them."
    ),
    assumes="1 <= T <= samples held.",
    reasoning=(
        "Run with any costs and numbers, on windows of 1 to 3 samples and on every alignment of up "
        "to three groups with up to four samples in all: a carry, a split and neither. Both "
        "functions are loops that treat each sample and group alike (grouping is the fold of "
        "`budget`, splitting the loop of `alignment-succeeds`, a carry a partition by age)."
    ),
    leaves_out=(
        "Larger windows and groups: they are covered by that argument, and by tests with random "
        "ones and with splits of groups of up to 40, not by the solver. That the shared draw is a "
        "permutation: tested for random keys."
    ),
    obligations=(*_grouping(), *_aligning()),
)
