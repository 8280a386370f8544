"""Grouping and alignment keep the budget, lose nothing, and leave no group short for no reason."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.alignment import align
from spec.config import Budget, CostRule
from spec.draw import permutation
from spec.errors import ConfigError, EnvelopeError
from spec.grouping import batch_cost, group, load_of_group, oversize, within
from spec.samples import Sample
from tests.strategies import budgets, shards


def samples(*costs: int) -> tuple[Sample, ...]:
    return tuple(Sample(i, c, c) for i, c in enumerate(costs))


def costs_of(groups: tuple[tuple[Sample, ...], ...]) -> list[list[int]]:
    return [[s.cost for s in g] for g in groups]


def test_groups_go_from_the_longest_down_and_are_full() -> None:
    assert costs_of(group(Budget(12), samples(1, 2, 3, 4, 5, 6))) == [[6, 5], [4, 3, 2], [1]]


def test_the_longest_sample_takes_its_neighbour_along() -> None:
    # The released reference always emits the longest sample of a window alone.
    assert costs_of(group(Budget(12), samples(6, 6, 1))) == [[6, 6], [1]]


def test_summed_costs_pack_without_padding() -> None:
    budget = Budget(12, CostRule.SUMMED)
    assert costs_of(group(budget, samples(1, 2, 3, 4, 5, 6))) == [[6, 5], [4, 3, 2, 1]]


def test_an_oversize_sample_travels_alone() -> None:
    groups = group(Budget(10), samples(3, 50, 3))
    assert costs_of(groups) == [[50], [3, 3]]
    assert oversize(Budget(10), groups[0][0])
    assert not oversize(Budget(10), groups[1][0])


def test_every_further_resource_has_its_own_budget() -> None:
    patches = tuple(Sample(i, 1, 1, (p, 1)) for i, p in enumerate([4, 4, 1, 9]))
    groups = group(Budget(100, extras=(8, 3)), patches)
    assert [[s.extras[0] for s in g] for g in groups] == [[4, 4], [1], [9]]


def test_max_samples_bounds_a_group() -> None:
    assert costs_of(group(Budget(100, max_samples=2), samples(1, 1, 1))) == [[1, 1], [1]]


def test_rounding_up_counts_against_the_budget() -> None:
    # 3 rows of 5 are 15 tokens, but 24 when padded to a multiple of 8.
    assert costs_of(group(Budget(16, multiple=8), samples(5, 5, 5))) == [[5, 5], [5]]


@given(budgets(), st.data())
def test_grouping_partitions_within_the_budget(budget: Budget, data: st.DataObject) -> None:
    shard = data.draw(shards(extras=len(budget.extras)))
    groups = group(budget, shard)
    assert sorted(s for g in groups for s in g) == sorted(shard)
    for g in groups:
        assert within(budget, load_of_group(g))
    for g, following in pairwise(groups):
        assert not within(budget, load_of_group((*g, following[0])))  # full


@given(budgets(), st.data())
def test_alignment_succeeds_exactly_in_the_envelope(budget: Budget, data: st.DataObject) -> None:
    shard = data.draw(shards(extras=len(budget.extras)))
    groups = group(budget, shard)
    target = data.draw(st.integers(0, len(shard) + 2))
    if not 1 <= target <= len(shard):
        with pytest.raises(EnvelopeError):
            align(groups, target)
        return
    aligned, carried = align(groups, target)
    assert len(aligned) == target
    assert all(aligned)
    assert sorted([s for g in aligned for s in g] + list(carried)) == sorted(shard)
    assert all(within(budget, load_of_group(g)) for g in aligned)
    assert list(carried) == sorted(carried, key=lambda s: s.seq)
    if carried:
        # The oldest leaves at once, and a group is carried only for one with an older sample.
        assert min(s.seq for g in aligned for s in g) < min(s.seq for s in carried)


def test_split_halves_the_group_with_the_most_samples() -> None:
    groups = group(Budget(8), samples(4, 4, 1, 1, 1, 1))
    assert costs_of(align(groups, 3).groups) == [[4, 4], [1, 1], [1, 1]]


def test_carry_keeps_the_groups_with_the_oldest_samples() -> None:
    # By size the long one would be kept, and short ones could starve.
    groups = group(Budget(8), samples(1, 2, 8, 7))
    assert costs_of(align(groups, 1).groups) == [[2, 1]]
    assert [s.cost for s in align(groups, 1).carried] == [8, 7]


@given(st.integers(0, 50), st.integers(0, 2**40), st.integers(0, 2**40))
def test_the_shared_draw_is_a_permutation_of_its_key(size: int, seed: int, round_: int) -> None:
    order = permutation(size, seed, 0, round_)
    assert sorted(order) == list(range(size))
    assert order == permutation(size, seed, 0, round_)


def test_the_shared_draw_is_the_same_on_every_machine() -> None:
    assert permutation(8, 7, 0, 3) == (7, 1, 3, 5, 0, 2, 6, 4)
    firsts = [permutation(4, 0, 0, round_)[0] for round_ in range(4000)]
    assert all(900 < firsts.count(i) < 1100 for i in range(4))


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True, "512"])
def test_a_budget_must_be_a_positive_whole_number(tokens: object) -> None:
    with pytest.raises(ConfigError, match="token budget"):
        Budget(tokens)  # type: ignore[arg-type]


def test_batch_cost_is_what_memory_sees() -> None:
    load = load_of_group(samples(5, 3, 3))
    assert batch_cost(Budget(99), load) == 15
    assert batch_cost(Budget(99, multiple=4), load) == 24
    assert batch_cost(Budget(99, CostRule.SUMMED), load) == 11


@pytest.mark.parametrize("size", [4, 5, 6, 7, 8, 13, 16, 40])
def test_a_large_group_is_split_into_any_number_of_parts(size: int) -> None:
    group_ = tuple(Sample(i, 100 - i, 1) for i in range(size))
    for target in range(1, size + 1):
        groups, carried = align((group_,), target)
        assert len(groups) == target
        assert all(groups)
        assert not carried
        assert sorted(s for part in groups for s in part) == sorted(group_)
