"""DeepSpeed, ZeRO 0 to 3: the conformance suite, counts, clipping, bf16, evaluation, misuse.

DeepSpeed is in an environment of its own: `make test-trainers`. Its ranks start once for all tests,
as it takes long to import.
"""

from __future__ import annotations

import csv
import os
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import odb
from odb.integrations.base import version_of
from odb.testing import run_ranks
from tests.test_examples import torchrun
from tests.trainers import checks
from tests.trainers import conformance as suite
from tests.trainers.conformance import FLOAT32_CASES, Case, RankResult, Subject, said

STAGES = (0, 1, 2, 3)
CLIPPED = Case(3, clip_norm=0.05)
BF16 = {"bf16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
PRESCALED = {"prescale_gradients": True, "gradient_predivide_factor": 2.0}
LOW_PRECISION = ((0, AUTOCAST), (1, BF16), (2, BF16), (3, BF16))

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed here: make test-trainers"
)


# ---------------------------------------------------------------- what the ranks do


def initialize(stage: int, case: Case, **config: Any) -> tuple[Any, suite.StepCounter]:
    import deepspeed

    model = suite.make_model(case.dtype)
    optimizer = suite.make_optimizer(model.parameters())
    # Like every schedule of torch, it is stepped with the optimizer.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": case.accumulation,
            "gradient_clipping": case.clip_norm or 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            **config,
        },
    )
    return engine, suite.StepCounter(optimizer)


def whole_parameters(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    partitioned = engine.zero_optimization_stage() == 3
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters) if partitioned else nullcontext():
        return suite.parameters_of(engine.module)


def train(rank: int, stage: int, case: Case, **config: Any) -> RankResult:
    from odb.integrations.deepspeed import DeepSpeedLoop

    loader = suite.make_loader(case, rank)
    engine, counter = initialize(stage, case, **config)
    loop = DeepSpeedLoop(engine, loader)
    for _ in range(case.epochs):
        for batch, _info in loop:
            loop.backward(engine(**batch)["loss"])
            loop.step()
    loader.close()
    assert loop.progress.optimizer_steps == engine.global_steps == counter.steps
    assert engine.lr_scheduler.last_epoch == counter.steps
    assert loop.progress.samples == engine.global_samples == case.epochs * len(suite.make_dataset())
    return RankResult(whole_parameters(engine), counter.steps, loader.infos)


def train_naively(rank: int, stage: int, case: Case) -> RankResult:
    """With DeepSpeed's own ways: it divides by the accumulation steps and averages over ranks."""
    loader = suite.make_loader(case, rank)
    engine, counter = initialize(stage, case)
    for _ in range(case.epochs):
        for batch in loader:
            odb.pop_step_info(batch)
            engine.backward(engine(**batch)["loss"])
            engine.step()
    loader.close()
    return RankResult(whole_parameters(engine), counter.steps, loader.infos)


def monitored(rank: int, folder: str) -> None:
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}
    train(rank, 1, Case(3), **monitor)


def evaluate(rank: int) -> tuple[float, float]:
    """The mean loss of an untrained model over all label tokens, under ZeRO 3 and in one process.
    Gathering parameters needs every rank in every step, so that idle ones take part."""
    loader = suite.make_loader(Case(), rank, loss_scaling="none")
    engine, _ = initialize(3, Case())
    engine.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch, info in loader.steps():
            loss = engine(**batch)["loss"]
            if not info.idle:
                weight = int((batch["labels"][:, 1:] != -100).sum())
                total += torch.tensor([loss.item() * weight, weight])
    loader.close()
    dist.all_reduce(total)
    dataset = suite.make_dataset()
    whole = odb.PadCollate()([dataset[i] for i in range(len(dataset))])
    expected = suite.make_model()(**whole)["loss"].item()
    return (total[0] / total[1]).item(), expected


def misuse(rank: int) -> list[tuple[str, str]]:
    """What was said, and what should be in it."""
    import deepspeed

    from odb.integrations.deepspeed import DeepSpeedLoop, check_engine

    own = [dist.new_group([0]), dist.new_group([1])][rank]
    loader = partial(odb.ODBDataLoader, [{"input_ids": [1]}], token_budget=8)

    def engine(**config: Any) -> Any:
        return initialize(1, Case(3), **config)[0]

    good = engine()
    with_data, *_ = deepspeed.initialize(
        model=nn.Linear(2, 2),
        training_data=[1, 2],
        config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}},
    )
    blocks = loader(accumulation_steps=3)
    return [
        (said(lambda: check_engine(nn.Linear(2, 2))), "no DeepSpeedEngine"),
        (said(lambda: check_engine(with_data)), "training_data="),
        (
            said(lambda: check_engine(engine(gradient_allreduce_op="sum"))),
            '"gradient_allreduce_op" to "mean"',
        ),
        (
            said(lambda: check_engine(engine(managed_gradient_accumulation=False))),
            '"managed_gradient_accumulation"',
        ),
        (said(lambda: DeepSpeedLoop(good, loader())), '"gradient_accumulation_steps": 3'),
        (said(lambda: DeepSpeedLoop(good, [])), "no odb.ODBDataLoader"),
        (
            said(lambda: DeepSpeedLoop(good, loader(group=own, accumulation_steps=3))),
            f"aligns the ranks {rank}",
        ),
        (
            said(lambda: DeepSpeedLoop(good, loader(loss_scaling="none", accumulation_steps=3))),
            'loss_scaling="exact"',
        ),
        (
            said(lambda: DeepSpeedLoop(good, loader(idle="stop"))),
            'idle="pad"',
        ),
        (said(lambda: DeepSpeedLoop(good, blocks)), "no error"),
    ]


def misuse_of_steps(rank: int) -> list[tuple[str, str]]:
    """Both ranks do the same, so that none is left waiting."""
    from odb.integrations.deepspeed import DeepSpeedLoop

    loader = suite.make_loader(Case(3), rank)
    engine, _ = initialize(2, Case(3))

    def skips_backward() -> None:
        for _ in DeepSpeedLoop(engine, loader):
            pass

    def skips_step() -> None:
        loop = DeepSpeedLoop(engine, loader)
        for batch, _info in loop:
            loop.backward(engine(**batch)["loss"])

    def backward_twice() -> None:
        loop = DeepSpeedLoop(engine, loader)
        for batch, _info in loop:
            loop.backward(engine(**batch)["loss"])
            loop.backward(engine(**batch)["loss"])

    def leaves_a_block() -> None:
        loop = DeepSpeedLoop(engine, loader)
        for batch, _info in loop:
            loop.backward(engine(**batch)["loss"])
            loop.step()
            break
        next(iter(loop))

    found = [
        (said(skips_backward), "has no backward yet"),
        (said(skips_step), "step() was not called"),
        (said(backward_twice), "out of turn"),
        (said(leaves_a_block), "within a block"),
    ]
    loader.close()
    return found


def work(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
    import deepspeed

    deepspeed.init_distributed("gloo")
    monitored(rank, folder)
    return {
        "exact": {(s, case): train(rank, s, case) for s in STAGES for case in FLOAT32_CASES},
        "naive": {
            (s, case): train_naively(rank, s, case) for s in STAGES for case in FLOAT32_CASES
        },
        "clipped": {stage: train(rank, stage, CLIPPED) for stage in STAGES},
        "prescaled": train(rank, 0, Case(3), **PRESCALED),
        "low": [train(rank, stage, Case(3), **config) for stage, config in LOW_PRECISION],
        "evaluation": evaluate(rank),
        "misuse": misuse(rank) + misuse_of_steps(rank),
    }


# ---------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    found = run_ranks(work, 2, str(folder), start_method="fork", timeout=280)
    assert isinstance(found, list)
    return found


def subject(stage: int) -> Subject:
    return Subject(f"DeepSpeed ZeRO-{stage}", version_of("deepspeed"), extra_lines=2)


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_conforms(ranks: list[dict[str, Any]], stage: int) -> None:
    """Promise: exact-gradient. Counts of steps and samples are checked on the ranks. DeepSpeed
    reduces no float64."""
    checks.conform(
        subject(stage),
        FLOAT32_CASES,
        exact=lambda case: [rank["exact"][stage, case] for rank in ranks],
        naive=lambda case: [rank["naive"][stage, case] for rank in ranks],
    )


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_clipping_sees_the_exact_gradient(ranks: list[dict[str, Any]], stage: int) -> None:
    checks.clips(subject(stage), CLIPPED, [rank["clipped"][stage] for rank in ranks])


@needs_deepspeed
def test_prescaling_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    suite.judge(subject(0), Case(3), [rank["prescaled"] for rank in ranks])


@needs_deepspeed
@pytest.mark.parametrize("number", range(len(LOW_PRECISION)))
def test_low_precision_is_close(ranks: list[dict[str, Any]], number: int) -> None:
    checks.is_close(Case(3), [rank["low"][number] for rank in ranks], most=1e-2)


@needs_deepspeed
def test_monitors_count_the_samples_that_were_trained_on(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    """DeepSpeed itself would say 6 for every optimizer step: 2 ranks, 3 steps, 1 sample each."""
    path = next(folder.rglob("*lr.csv"))
    rows = list(csv.reader(path.read_text().splitlines()))[1:]
    by_block: dict[tuple[int, int], int] = {}
    for info in ranks[0]["exact"][1, Case(3)].infos:
        by_block[info.epoch, info.block] = info.block_samples
    expected = torch.tensor(list(by_block.values())).cumsum(0).tolist()
    assert [int(row[0]) for row in rows] == expected


@needs_deepspeed
def test_evaluation_gives_the_mean_over_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for found, expected in (rank["evaluation"] for rank in ranks):
        assert found == pytest.approx(expected, abs=1e-6)


@needs_deepspeed
def test_misuse_is_told_apart(ranks: list[dict[str, Any]]) -> None:
    checks.is_said(ranks)


@needs_deepspeed
def test_the_example_runs() -> None:
    assert "epoch 1 rank 0" in torchrun("train_deepspeed.py")


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="deepspeed is installed")
def test_without_deepspeed_the_extra_is_named() -> None:
    from odb.integrations.deepspeed import check_engine

    with pytest.raises(odb.MissingDependencyError, match=r"verified-odb\[deepspeed\]"):
        check_engine(nn.Linear(2, 2))
