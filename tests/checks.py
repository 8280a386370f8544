"""What must hold of the records that the ranks of a case bring home (see `tests/jobs.py`)."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np

from tests.jobs import Case, EpochOfRank


def check_case(case: Case, ranks: list[list[EpochOfRank]]) -> None:
    """Check every epoch of a case. `ranks[r][e]` is what rank r saw in its epoch e."""
    assert len(ranks) == len(case.shards)
    for of_rank in ranks:
        assert len(of_rank) == case.epochs
    for epoch in zip(*ranks, strict=True):
        check_epoch(case, list(epoch))


def check_epoch(case: Case, ranks: list[EpochOfRank]) -> None:
    """The promises that an epoch must keep on real processes."""
    joined = case.options.get("join", True)
    check_identities(case, ranks, complete=joined)
    check_steps(ranks, stop=case.options.get("idle") == "stop")
    check_budget(ranks, case.options.get("token_budget", 512))
    check_gradient(ranks)
    if not joined:
        check_quota(case, ranks)


def expected_names(case: Case) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """The samples to deliver, and those to filter: no tokens, or too few for the causal shift."""
    names = {(r, i): n for r, shard in enumerate(case.shards) for i, n in enumerate(shard.lengths)}
    return {k for k, n in names.items() if n > 1}, {k for k, n in names.items() if n <= 1}


def check_identities(case: Case, ranks: list[EpochOfRank], *, complete: bool) -> None:
    """Promise: identity-coverage."""
    good, bad = expected_names(case)
    delivered = [name for rank in ranks for name in rank.names]
    assert len(delivered) == len(set(delivered)), "a sample was delivered twice"
    for r, rank in enumerate(ranks):
        for step in rank.steps:
            assert len(step.names) == len(step.info.sample_ids) == step.info.local_samples
            if not case.stream:
                assert [i for _, i in step.names] == list(step.info.sample_ids)
            assert all(owner == r for owner, _ in step.names)
        assert len(set(rank.filtered)) == len(rank.filtered)
    filtered = sum(len(rank.filtered) for rank in ranks)
    if complete:
        assert set(delivered) == good, "a sample was lost"
        assert filtered == len(bad)
        assert all(rank.complete and not rank.undelivered for rank in ranks)
        if not case.stream:
            listed = {(r, f.sample_id) for r, rank in enumerate(ranks) for f in rank.filtered}
            assert listed == bad
    else:
        assert set(delivered) <= good
        held = {(r, i) for r, rank in enumerate(ranks) for i in rank.undelivered}
        assert not held & set(delivered)


def check_steps(ranks: list[EpochOfRank], *, stop: bool) -> None:
    """Promise: step-alignment."""
    plans = [[(s.info.step, s.info.round, s.info.global_samples) for s in r.steps] for r in ranks]
    longest = max(plans, key=len)
    assert [step for step, _, _ in longest] == list(range(len(longest)))
    for rank, plan in zip(ranks, plans, strict=True):
        if stop:
            assert plan == longest[: len(plan)]
            assert not any(step.info.idle for step in rank.steps)
        else:
            assert plan == longest, "ranks took different steps"


def check_budget(ranks: list[EpochOfRank], budget: int) -> None:
    """Promise: budget, measured on the padded batches themselves."""
    for rank in ranks:
        for step in rank.steps:
            if step.rows > 1:
                assert step.rows * step.longest <= budget
            elif step.longest > budget:
                assert step.info.sample_ids[0] in rank.oversize


def check_gradient(ranks: list[EpochOfRank]) -> None:
    """Promise: exact-gradient. The average over all ranks of the scaled gradients is the gradient
    of the mean over all label positions of the step."""
    world_size = len(ranks)
    for number, steps in enumerate(zip_longest(*(rank.steps for rank in ranks))):
        present = [step for step in steps if step is not None]
        averaged = np.sum([step.gradient for step in present], axis=0) / world_size
        positions = sum(step.label_positions for step in present)
        reference = np.sum([step.loss_sum_gradient for step in present], axis=0) / positions
        error = np.abs(averaged - reference).max()
        assert error <= 1e-9, f"step {number}: the gradient is off by {error}"
        for step in present:
            assert step.info.global_weight == positions
            assert step.info.local_weight == step.label_positions
            assert (step.info.loss_scale == 0.0) == step.info.idle


def check_quota(case: Case, ranks: list[EpochOfRank]) -> None:
    """Promise: quota-closure."""
    quota = case.options.get("quota")
    totals = [step.info.global_samples for step in ranks[0].steps]
    good, _ = expected_names(case)
    if quota is None:
        assert not any(step.info.idle for rank in ranks for step in rank.steps)
        per_rank = [sum(r == rank for r, _ in good) for rank in range(len(ranks))]
        drained = [len(rank.names) == per_rank[r] for r, rank in enumerate(ranks)]
        assert any(drained), "the epoch ended before any rank had drained"
    else:
        assert sum(totals) >= min(quota, len(good))
        assert sum(totals[:-1]) < quota
