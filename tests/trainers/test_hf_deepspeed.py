"""DeepSpeed below Hugging Face's Trainer and Accelerate: the conformance suite, counts, schedules,
and what is refused.

DeepSpeed is in an environment of its own: `make test-trainers`.
"""

from __future__ import annotations

import math
import os
from contextlib import closing, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from odb.integrations.base import version_of
from tests.trainers import checks, extras
from tests.trainers import conformance as c
from tests.trainers.cpu_shim import accelerate_on_cpus
from tests.trainers.launch import run_as_torchrun

pytest.importorskip("transformers", reason="the extra 'huggingface' is not installed")
if find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed here: make test-trainers", allow_module_level=True)

from tests.trainers import test_accelerate, test_huggingface

STAGES = (1, 2, 3)
CLIPPED = c.Case(3, clip_norm=extras.MAX_NORM)
SAMPLES = len(c.make_dataset())
BASE = 4
"""Samples of a block for which the learning rate is meant."""


# ---------------------------------------------------------------- what the ranks do


def configuration(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        **more,
    }


def whole_parameters(model: Any, stage: int) -> dict[str, torch.Tensor]:
    import deepspeed

    own = list(model.parameters())
    with deepspeed.zero.GatheredParameters(own) if stage == 3 else nullcontext():
        return c.parameters_of(model)


def trainer_engine(stage: int, **config: Any) -> test_huggingface.Engine:
    return test_huggingface.Engine(
        options={"deepspeed": configuration(stage, **config)},
        parameters=lambda trainer: whole_parameters(trainer.model, stage),
        steps=steps_of,
    )


def steps_of(trainer: Any) -> int:
    seen = getattr(trainer, "seen", None)
    if seen is not None:
        assert trainer.deepspeed.global_samples == seen.samples
    return int(trainer.deepspeed.global_steps)


def accelerate_engine(stage: int) -> test_accelerate.Engine:
    def options() -> dict[str, Any]:
        from accelerate import DeepSpeedPlugin

        config = configuration(stage, train_micro_batch_size_per_gpu=1, gradient_clipping=0.0)
        return {"cpu": False, "deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}

    def parameters(accelerator: Any, model: Any) -> dict[str, torch.Tensor]:
        return whole_parameters(accelerator.unwrap_model(model), stage)

    return test_accelerate.Engine(options, parameters)


def with_trainer(rank: int, folder: str, case: c.Case, stage: int, **options: Any) -> Any:
    engine = options.pop("engine", None) or trainer_engine(stage)
    return test_huggingface.train(rank, folder, case, engine=engine, **options)


def work(rank: int, world_size: int, folder: str) -> dict[Any, Any]:
    os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
    with accelerate_on_cpus():
        return {
            **{
                (stage, case): pairs_of(rank, folder, stage, case)
                for stage in STAGES
                for case in c.FLOAT32_CASES
            },
            "clipped": {
                stage: with_trainer(rank, folder, CLIPPED, stage, max_grad_norm=CLIPPED.clip_norm)
                for stage in STAGES
            },
            "falling": {
                stage: test_accelerate.train(
                    rank, c.Case(3), engine=accelerate_engine(stage), schedule=extras.falling
                )
                for stage in STAGES
            },
            "scaled": {
                stage: test_accelerate.train(
                    rank, c.Case(3), engine=accelerate_engine(stage), base=BASE
                ).result
                for stage in STAGES
            },
            "its own optimizer": with_trainer(
                rank,
                folder,
                c.Case(3),
                2,
                engine=trainer_engine(2, optimizer=OWN_OPTIMIZER),
                learning_rate=0.1,
                lr_scheduler_type="linear",
                warmup_steps=0.25,
            ),
            "its own schedule": with_trainer(
                rank,
                folder,
                c.Case(3),
                2,
                engine=trainer_engine(2, optimizer=OWN_OPTIMIZER, scheduler=OWN_SCHEDULE),
                learning_rate=0.1,
                max_steps=7,
                warmup_steps=2,
            ),
            "misuse": misuse(rank, folder),
        }


OWN_OPTIMIZER = {"type": "SGD", "params": c.SGD}
OWN_SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "warmup_type": "linear",
        "total_num_steps": "auto",
    },
}


def pairs_of(rank: int, folder: str, stage: int, case: c.Case) -> dict[str, Any]:
    """By each trainer: with odb, and naively."""
    steps = test_huggingface.NAIVE_STEPS[case.accumulation]
    engine = accelerate_engine(stage)
    return {
        "Trainer": (
            with_trainer(rank, folder, case, stage).result,
            with_trainer(rank, folder, case, stage, naive=steps).result,
        ),
        "Accelerate": (
            test_accelerate.train(rank, case, engine=engine).result,
            test_accelerate.train(rank, case, engine=engine, naive=True).result,
        ),
    }


def misuse(rank: int, folder: str) -> list[tuple[str, str]]:
    """What was said, and what should be in it. Nothing of it gets as far as a collective of one
    rank alone."""
    from accelerate import DeepSpeedPlugin
    from accelerate.utils import DummyOptim, DummyScheduler

    from odb.integrations.accelerate import prepare

    def trained(**config: Any) -> None:
        with_trainer(rank, folder, c.Case(3), 2, engine=trainer_engine(2, **config))

    def accelerator(accumulation: int) -> Any:
        options = accelerate_engine(2).options()
        return test_accelerate.fresh_accelerator(
            gradient_accumulation_steps=accumulation, **options
        )

    def dummy_schedule() -> None:
        optimizer = DummyOptim(c.make_model().parameters(), lr=0.1)
        prepare(accelerator(1), c.make_model(), optimizer, DummyScheduler(optimizer, 10))

    def two_schedules() -> None:
        plugin = DeepSpeedPlugin(hf_ds_config=configuration(2, scheduler=OWN_SCHEDULE))
        both = test_accelerate.fresh_accelerator(cpu=False, deepspeed_plugin=plugin)
        model = c.make_model()
        optimizer = c.make_optimizer(model.parameters())
        prepare(both, model, optimizer, LambdaLR(optimizer, extras.falling))

    def no_model() -> None:
        with closing(c.make_loader(c.Case(3), rank)) as loader:
            next(iter(prepare(accelerator(3), loader)))

    def other_blocks() -> None:
        model = c.make_model()
        with closing(c.make_loader(c.Case(3), rank)) as loader:
            prepare(accelerator(2), model, c.make_optimizer(model.parameters()), loader)

    return [
        (c.said(partial(trained, gradient_allreduce_op="sum")), '"gradient_allreduce_op"'),
        (
            c.said(partial(trained, optimizer=OWN_OPTIMIZER, scheduler=OWN_SCHEDULE)),
            "leave it out, so that the Trainer's own lr_scheduler_type follows the samples",
        ),
        (c.said(dummy_schedule), '"total_num_steps" in the DeepSpeed configuration'),
        (c.said(two_schedules), 'configuration has a "scheduler"'),
        (c.said(no_model), "prepare the model before"),
        (c.said(other_blocks), "accumulation_steps=3, but the accelerator has"),
    ]


# ---------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_as_torchrun(work, str(tmp_path_factory.mktemp("deepspeed")), timeout=290)


def subject(trainer: str, stage: int) -> c.Subject:
    return extras.subject_below(trainer, f"DeepSpeed ZeRO-{stage}", version_of("deepspeed"))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("trainer", ["Trainer", "Accelerate"])
def test_conformance(ranks: Any, trainer: str, stage: int) -> None:
    """Promise: exact-gradient. DeepSpeed reduces no float64."""
    checks.conform(
        subject(trainer, stage),
        c.FLOAT32_CASES,
        exact=lambda case: [rank[stage, case][trainer][0] for rank in ranks],
        naive=lambda case: [rank[stage, case][trainer][1] for rank in ranks],
    )


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_in_the_trainer(ranks: Any, stage: int) -> None:
    results = [rank["clipped"][stage].result for rank in ranks]
    checks.clips(subject("Trainer", stage), CLIPPED, results)


@pytest.mark.parametrize("stage", STAGES)
def test_a_schedule_of_torch_in_accelerate(ranks: Any, stage: int) -> None:
    outcomes = [rank["falling"][stage] for rank in ranks]
    results = [outcome.result for outcome in outcomes]
    expected = extras.reference(c.Case(3), results, schedule=extras.falling)
    assert extras.difference(results, expected) <= 1e-6
    for outcome in outcomes:
        assert outcome.scheduler_steps == outcome.result.optimizer_steps


@pytest.mark.parametrize("stage", STAGES)
def test_learning_rates_that_follow_the_size_of_blocks(ranks: Any, stage: int) -> None:
    results = [rank["scaled"][stage] for rank in ranks]
    sizes = [info.block_samples for info in results[0].infos if info.last_in_block]
    expected = extras.reference(c.Case(3), results, schedule=lambda step: [*sizes, 0][step] / BASE)
    assert extras.difference(results, expected) <= 1e-6
    assert extras.difference(results, extras.reference(c.Case(3), results)) > 1e-3


def test_with_an_optimizer_of_deepspeed_the_schedule_follows_the_samples(ranks: Any) -> None:
    """DeepSpeed takes the schedule's step within the backward: the block counts already then."""
    total = 2 * SAMPLES
    warm = math.ceil(0.25 * total)
    for rank in ranks:
        trained = [entry for entry in rank["its own optimizer"].log if "loss" in entry]
        assert trained[-1]["samples_seen"] == total
        for entry in trained:
            seen = entry["samples_seen"]
            factor = seen / warm if seen < warm else (total - seen) / (total - warm)
            assert entry["learning_rate"] == pytest.approx(0.1 * factor), (
                "DeepSpeed's is logged behind the step"
            )


def test_a_schedule_of_deepspeed_takes_a_step_for_each_of_the_optimizer(ranks: Any) -> None:
    for rank in ranks:
        outcome = rank["its own schedule"]
        assert outcome.result.optimizer_steps == 7
        rates = [entry["learning_rate"] for entry in outcome.log if "loss" in entry]
        expected = [0.1 * (n / 2 if n < 2 else (7 - n) / 5) for n in range(7)]
        assert rates == pytest.approx(expected), "WarmupDecayLR, from 0 and over max_steps"


def test_misuse_is_told_apart(ranks: Any) -> None:
    checks.is_said(ranks)
