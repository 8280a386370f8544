"""The conformance suite notices what it is there to notice.

One process plays both ranks, so that every way of going wrong can be tried quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import odb
from odb.info import ODBStepInfo
from odb.testing import run_ranks
from tests.trainers import conformance as suite
from tests.trainers import verdicts
from tests.trainers.conformance import Case, RankResult, Subject

Step = tuple[Any, ODBStepInfo]
PLAYED = Subject("played in one process", torch.__version__, extra_lines=2)


def read(rank: int, world_size: int) -> list[list[Step]]:
    read = []
    for case in suite.CASES:
        loader = suite.make_loader(case, rank)
        read.append([step for _ in range(case.epochs) for step in loader.steps()])
        assert [info for _, info in read[-1]] == loader.infos
        loader.close()
    return read


@cache
def steps_of(case: Case) -> list[list[Step]]:
    """What each rank's loader yields in a case."""
    return [rank[suite.CASES.index(case)] for rank in _read_once()]


@cache
def _read_once() -> list[list[list[Step]]]:
    found: list[list[list[Step]]] = run_ranks(read, 2, start_method="fork", timeout=60)
    return found


def play(
    case: Case,
    *,
    scale: Callable[[ODBStepInfo], float] = lambda info: info.loss_scale,
    runs: Callable[[ODBStepInfo], bool] = lambda info: True,
    steps_at: Callable[[ODBStepInfo], bool] = lambda info: info.last_in_block,
    idle_scale: float = 0.0,
) -> list[RankResult]:
    """Train as DDP does: gradients averaged over ranks, added up until the optimizer steps."""
    ranks = steps_of(case)
    model = suite.make_model(case.dtype)
    optimizer = suite.make_optimizer(model.parameters())
    counter = suite.StepCounter(optimizer)
    for together in zip(*ranks, strict=True):
        for batch, info in together:
            if runs(info):
                chosen = idle_scale if info.idle else scale(info)
                (model(**batch)["loss"] * chosen / len(ranks)).backward()
        if steps_at(together[0][1]):
            optimizer.step()
            optimizer.zero_grad()
    return [
        RankResult(suite.parameters_of(model), counter.steps, [info for _, info in rank])
        for rank in ranks
    ]


def problems(case: Case, results: Sequence[RankResult]) -> str:
    return "\n".join(suite.measure(PLAYED, case, results).problems)


@pytest.mark.parametrize("case", suite.CASES, ids=str)
def test_right_training_conforms(case: Case) -> None:
    verdict = suite.judge(PLAYED, case, play(case), naive=play(case, scale=lambda info: 1.0))
    assert verdict.problems == ()
    assert verdict.steps_equal
    assert verdict.samples_once
    assert verdict.naive_difference is not None
    assert verdict.naive_difference > 0.01


def test_the_data_has_what_goes_wrong_elsewhere() -> None:
    """Idle steps and blocks, blocks across rounds, a short last block, unequal label weights."""
    ranks = [[info for _, info in rank] for rank in steps_of(Case(3))]
    assert sum(info.idle for info in ranks[1]) > 5
    assert not any(info.idle for info in ranks[0])
    blocks: dict[Any, list[ODBStepInfo]] = {}
    for info in ranks[1]:
        blocks.setdefault((info.epoch, info.block), []).append(info)
    idle_in = {tuple(info.idle for info in block) for block in blocks.values()}
    assert {(True, True, True), (False, False, False)} < idle_in
    assert any(len(set(block)) == 2 for block in idle_in), "no block in which rank 1 is drained"
    assert any(len({info.round for info in block}) > 1 for block in blocks.values())
    assert any(block[0].block_steps < 3 for block in blocks.values())
    ratios = [i.local_weight / i.local_tokens for rank in ranks for i in rank if not i.idle]
    assert max(ratios) > 3 * min(ratios)


def test_a_wrong_scale_is_noticed() -> None:
    case = Case(3)
    for wrong in (1.0, 0.999):
        results = play(case, scale=lambda info, wrong=wrong: info.loss_scale * wrong)  # type: ignore[misc]
        assert ("off by" in problems(case, results)) == (wrong != 1.0)
    per_step = play(case, scale=lambda info: 2 * info.local_weight / info.global_weight)
    assert "off by" in problems(case, per_step), "means of means over a block should show"
    per_samples = play(case, scale=lambda i: 2 * i.local_samples / i.block_samples)
    assert "off by" in problems(case, per_samples)


def test_an_idle_step_that_adds_to_the_gradient_is_noticed() -> None:
    assert "off by" in problems(Case(1), play(Case(1), idle_scale=1.0))


def test_a_dropped_step_is_noticed() -> None:
    """One that is idle adds nothing to the gradient; what leaving it out does to real ranks is in
    `test_ddp.py`."""
    case = Case(1)
    _, left_out = steps_of(case)[1][1]
    dropped = play(case, runs=lambda info: info is not left_out)
    assert "off by" in problems(case, dropped)
    results = play(case)
    short = replace(results[1], infos=[info for info in results[1].infos if not info.idle])
    assert "ranks took different steps" in problems(case, [results[0], short])


def test_a_training_without_idle_steps_proves_nothing() -> None:
    results = play(Case(1))
    awake = [replace(r, infos=[replace(info, idle=False) for info in r.infos]) for r in results]
    assert "no rank was ever idle" in problems(Case(1), awake)


def test_samples_that_are_doubled_or_lost_are_noticed() -> None:
    results = play(Case(1))
    for position, name in ((0, "more than once: [0]"), (1, "missing")):
        first = results[0].infos[0]
        ids = ((*first.sample_ids, 0), first.sample_ids[1:])[position]
        changed = [replace(first, sample_ids=ids), *results[0].infos[1:]]
        text = problems(Case(1), [replace(results[0], infos=changed), results[1]])
        assert name in text
        assert "off by" in text


def test_one_optimizer_step_more_or_less_is_noticed() -> None:
    case = Case(3)
    every_step = play(case, steps_at=lambda info: True)
    assert "optimizer steps for" in problems(case, every_step)
    tail_lost = play(case, steps_at=lambda info: info.block_step == 2)
    assert "optimizer steps for" in problems(case, tail_lost)
    results = play(case)
    miscounted = replace(results[1], optimizer_steps=results[1].optimizer_steps - 1)
    assert "rank 1 took" in problems(case, [results[0], miscounted])


def test_ranks_that_drift_apart_are_noticed() -> None:
    results = play(Case(1))
    moved = {**results[1].parameters, "head.bias": results[1].parameters["head.bias"] + 2e-6}
    assert "off by 2.0" in problems(Case(1), [results[0], replace(results[1], parameters=moved)])
    for broken in (float("nan"), float("inf")):
        lost = {**moved, "head.bias": moved["head.bias"] + broken}
        assert "off by inf" in problems(Case(1), [results[0], replace(results[1], parameters=lost)])
    renamed = {"other": results[1].parameters["head.bias"]}
    assert "off by inf" in problems(Case(1), [results[0], replace(results[1], parameters=renamed)])


def test_an_epoch_that_is_missing_is_noticed() -> None:
    results = play(Case(1))
    cut = [replace(r, infos=[info for info in r.infos if info.epoch == 0]) for r in results]
    assert "not 2 of them" in problems(Case(1), cut)


def test_members_of_a_coordinate_must_see_the_same() -> None:
    first, second = play(Case(1))
    verdict = suite.measure(PLAYED, Case(1), [first, first, second, second], members=2)
    assert verdict.problems == ()
    verdict = suite.measure(PLAYED, Case(1), [first, second, second, second], members=2)
    assert "did not see the batches of rank 0" in "\n".join(verdict.problems)


def test_wrong_block_weights_are_noticed() -> None:
    results = play(Case(3))
    infos = [replace(info, block_weight=info.global_weight) for info in results[0].infos]
    assert "weight of its block" in problems(
        Case(3), [replace(results[0], infos=infos), results[1]]
    )


def test_judge_raises_and_a_naive_arm_must_show_something() -> None:
    with pytest.raises(suite.NonconformingError, match="off by") as caught:
        suite.judge(PLAYED, Case(1), play(Case(1), scale=lambda info: 1.0))
    assert caught.value.verdict.max_difference > 0.01
    with pytest.raises(suite.NonconformingError, match="shows nothing"):
        suite.judge(PLAYED, Case(1), play(Case(1)), naive=play(Case(1)))


def test_verdicts_are_kept_and_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "VERDICTS", tmp_path)
    case = Case(3)
    good = suite.judge(PLAYED, case, play(case), naive=play(case, scale=lambda info: 1.0))
    bad = replace(good, dtype="float64", steps_equal=False, samples_once=False)
    verdicts.write_verdicts("Played Here", [good, bad])
    kept = verdicts.read_verdicts(tmp_path)
    assert [v.max_difference for v in kept] == [good.max_difference, bad.max_difference]
    row = verdicts.table(kept).splitlines()[-1]
    assert row.startswith(f"| played in one process | {torch.__version__} | yes | 3 |")
    assert "| NO | NO | 2 |" in row


def test_a_fresh_model_is_the_same_each_time_and_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, second = (suite.parameters_of(suite.make_model()) for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert suite.largest_difference(first, second) == 0.0
    assert odb.default_loss_weight(suite.make_dataset()[0]) == suite.label_tokens([0])
