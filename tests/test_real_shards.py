"""Uneven shards on real processes: nothing lost, nothing doubled, same steps, exact gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from odb.testing import run_ranks
from tests.checks import check_case
from tests.jobs import Case, EpochOfRank, Shard, lengths, run_case, run_cases

SHARDS: dict[str, tuple[Shard, ...]] = {
    "even": (Shard(lengths(64, 10, 500)), Shard(lengths(64, 10, 500, seed=1))),
    "uneven": (Shard(lengths(64, 10, 500)), Shard(lengths(40, 10, 500))),
    # The released reference loses a sample here.
    "long against short": (Shard(lengths(64, 400, 500)), Shard(lengths(40, 10, 20))),
    "many against few": (Shard(lengths(100, 400, 500)), Shard(lengths(3, 10, 20))),
    # The reference loses 21 samples, and its ranks take different numbers of steps.
    "zero lengths": (
        Shard(lengths(64, 400, 500)),
        Shard(tuple(0 if i % 3 == 0 else 10 for i in range(64))),
    ),
    "oversize": (Shard((*lengths(30, 10, 50), 5000)), Shard(lengths(31, 10, 50))),
    "none on one rank": (Shard(lengths(30, 10, 50)), Shard(())),
    "one sample on three ranks": (Shard(()), Shard((17,)), Shard(())),
    "no sample at all": (Shard(()), Shard(())),
    "four ranks": (
        Shard(lengths(30, 10, 500)),
        Shard(lengths(7, 10, 20)),
        Shard(()),
        Shard(lengths(50, 200, 300)),
    ),
    # Labels at very different shares of the positions: the loss scale is not the input length.
    "few labels": (
        Shard(lengths(64, 10, 500), labels="few"),
        Shard(lengths(40, 10, 100)),
    ),
    "few labels, many samples": (
        Shard(lengths(20, 300, 500)),
        Shard(lengths(64, 5, 30), labels="few"),
    ),
}

VARIANTS: dict[str, dict[str, Any]] = {
    "join, idle pad": {},
    "join, idle stop": {"options": {"idle": "stop"}},
    "quota mode, no quota": {"options": {"join": False}},
    "quota mode, quota 50": {"options": {"join": False, "quota": 50}},
    "stream": {"stream": True},
    "no workers": {"options": {"num_workers": 0}},
    "packed": {"options": {"max_samples": 3}},
    "persistent workers, three epochs": {
        "options": {"persistent_workers": True},
        "epochs": 3,
    },
    "early break, then a full epoch": {"break_at": 5},
    "early break, persistent workers": {"break_at": 5, "options": {"persistent_workers": True}},
}


def case_of(shards: str, variant: str) -> Case:
    return replace(Case(SHARDS[shards]), **VARIANTS[variant])


def run_and_check(case: Case, start_method: Any = "fork") -> list[list[EpochOfRank]]:
    ranks = run_ranks(run_case, len(case.shards), case, start_method=start_method, timeout=60)
    check_case(case, ranks)
    return ranks


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shards", SHARDS)
def test_shards(shards: str, variant: str) -> None:
    run_and_check(case_of(shards, variant))


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_start_method_aligns(start_method: Any, world_size: int) -> None:
    """The reference's side process has no process group under spawn: alignment is silently off.

    All shards in one job, as starting a process takes seconds here; the first case with workers,
    which start in the same way as the ranks.
    """
    cases = [
        case_of(shards, variant)
        for shards, of_ranks in SHARDS.items()
        for variant in ("join, idle pad", "join, idle stop", "quota mode, quota 50")
        if len(of_ranks) == world_size
    ]
    for i, case in enumerate(cases):
        workers = 1 if i == 0 else 0
        cases[i] = replace(case, options={**case.options, "num_workers": workers})
    ranks = run_ranks(run_cases, world_size, cases, start_method=start_method, timeout=120)
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        check_case(case, list(results))


def test_zero_lengths_are_filtered_and_nothing_else() -> None:
    case = case_of("zero lengths", "join, idle pad")
    ranks = run_and_check(case)
    assert ranks[0][0].filtered == []
    assert {f.sample_id for f in ranks[1][0].filtered} == set(range(0, 64, 3))
    assert {f.reason for f in ranks[1][0].filtered} == {"cost 0"}


def test_an_oversize_sample_is_delivered_alone_and_listed() -> None:
    ranks = run_and_check(case_of("oversize", "join, idle pad"))
    assert ranks[0][0].oversize == [30]
    (alone,) = [s for s in ranks[0][0].steps if s.longest == 5000]
    assert alone.names == [(0, 30)]


def test_a_rank_without_samples_takes_part_in_every_step() -> None:
    ranks = run_and_check(case_of("none on one rank", "join, idle pad"))
    steps = ranks[1][0].steps
    assert len(steps) == len(ranks[0][0].steps) > 0
    assert all(step.info.idle and step.rows == 1 for step in steps)


def test_no_sample_at_all_is_an_epoch_without_steps() -> None:
    ranks = run_and_check(case_of("no sample at all", "join, idle pad"))
    assert [len(rank[0].steps) for rank in ranks] == [0, 0]


def test_a_user_s_own_sampler_gives_every_epoch_its_order() -> None:
    case = Case(SHARDS["uneven"], {"persistent_workers": True, "reshuffle": True}, epochs=3)
    ranks = run_and_check(case)
    first, second, third = (epoch.names for epoch in ranks[0])
    assert sorted(first) == sorted(second) == sorted(third)
    assert first != second != third != first


def test_batches_do_not_depend_on_timing() -> None:
    """Promise: determinism."""
    case = case_of("uneven", "join, idle pad")
    runs = [
        [[step.names for step in rank[0].steps] for rank in run_and_check(c)]
        for c in (case, case, case_of("uneven", "no workers"))
    ]
    assert runs[0] == runs[1] == runs[2]
