"""`plan_microbatches`: as many micro-batches on every rank, none above the budget."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import odb
from odb.testing import run_ranks

COSTS: list[list[Any]] = [[7] * 8, [1, 2, 3]]


def plans(rank: int, world_size: int, costs: list[list[int]], options: Any) -> odb.MicrobatchPlan:
    first = odb.plan_microbatches(costs[rank], 8, **options)
    again = odb.plan_microbatches(costs[rank], 8, **options)  # over the same exchange
    assert first == again
    return first


def test_ranks_get_equally_many_and_idle_ones_are_marked() -> None:
    """[7]*8 needs 8 micro-batches; [1, 2, 3] can fill 3 of them."""
    a, b = run_ranks(plans, 2, COSTS, {}, start_method="fork", timeout=60)
    assert len(a) == len(b) == 8
    for plan, costs in ((a, COSTS[0]), (b, COSTS[1])):
        working = [m for m in plan if not m.idle]
        assert sorted(i for m in working for i in m.indices) == list(range(len(costs)))
        for m in working:
            chosen = [costs[i] for i in m.indices]
            assert len(chosen) * max(chosen) <= 8
            assert m.local_weight == sum(chosen)
    idle = [m for m in b if m.idle]
    assert len(idle) == 5
    assert {m.indices for m in idle} == {(0,)}  # the cheapest, to run with
    assert all(m.loss_scale == 0.0 for m in idle)
    assert sum(a.accumulated_scale(i) + b.accumulated_scale(i) for i in range(8)) == pytest.approx(
        2
    )
    assert a.global_weight == b.global_weight == 62


def test_a_rank_without_samples_gets_idle_microbatches() -> None:
    a, b = run_ranks(plans, 2, [[4, 4, 4], []], {}, start_method="fork", timeout=60)
    assert len(a) == len(b) == 2
    assert [m.indices for m in b] == [(), ()]


def dies_between_calls(rank: int, world_size: int) -> str:
    odb.plan_microbatches([3], 8)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        odb.plan_microbatches([3], 8)
    except odb.PeerLostError as error:
        return f"lost {error.rank}"
    return "no error"


def test_a_rank_that_dies_is_named() -> None:
    results = run_ranks(dies_between_calls, 3, start_method="fork", timeout=60, check=False)
    assert results.values == ("lost 1", None, "lost 1")
    assert [failure.rank for failure in results.failures] == [1]


def test_packed_costs_and_weights_in_one_process() -> None:
    plan = odb.plan_microbatches([5, 1, 1, 1, 0], 8, packed=True, weights=[1, 1, 1, 0, 1])
    assert [m.indices for m in plan] == [(0, 1, 2)]
    assert plan.filtered == (3, 4)
    assert plan[0].loss_scale == 1.0
    assert [len(m.indices) for m in odb.plan_microbatches([5, 1, 1], 8, max_samples=1)] == [1, 1, 1]


def fails(rank: int, world_size: int) -> str:
    try:
        odb.plan_microbatches([3, 1.5] if rank == 1 else [3], 8)  # type: ignore[list-item]
    except odb.ODBError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_bad_costs_on_one_rank_are_an_error_on_all() -> None:
    first, second = run_ranks(fails, 2, start_method="fork", timeout=60)
    assert first.startswith("PeerFailedError: rank 1 failed")
    assert second.startswith("CostError: the cost of sample 1 is 1.5")
    with pytest.raises(odb.CostError, match="2 weights for 1 costs"):
        odb.plan_microbatches([3], 8, weights=[1, 2])
