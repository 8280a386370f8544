"""FSDP below Hugging Face's Trainer and Accelerate: the conformance suite."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainers import checks, extras
from tests.trainers import conformance as c
from tests.trainers.cpu_shim import accelerate_on_cpus
from tests.trainers.launch import run_as_torchrun

pytest.importorskip("transformers", reason="the extra 'huggingface' is not installed")
pytest.importorskip("accelerate", reason="the extra 'accelerate' is not installed")

from tests.trainers import test_accelerate, test_huggingface

VERSIONS = {1: c.FLOAT32_CASES, 2: c.CASES}
"""Cases of each version of FSDP. The Trainer asks for the norm of gradients, which the first takes
in float32 only."""
CLIPPED = c.Case(3, clip_norm=extras.MAX_NORM)


def trainer_engine(version: int) -> test_huggingface.Engine:
    config: dict[str, Any] = {"version": version, "reshard_after_forward": True}
    if version == 1:
        config = {"version": 1, "sync_module_states": False}  # needs a device to broadcast on
    return test_huggingface.Engine(
        options={"fsdp": "full_shard", "fsdp_config": config},
        parameters=lambda trainer: whole_parameters(trainer.model, version),
    )


def accelerate_engine(version: int) -> test_accelerate.Engine:
    def options() -> dict[str, Any]:
        from accelerate import FullyShardedDataParallelPlugin

        more = {} if version == 2 else {"sync_module_states": False, "use_orig_params": True}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **more)
        return {"cpu": False, "fsdp_plugin": plugin}

    return test_accelerate.Engine(
        options=options, parameters=lambda _, model: whole_parameters(model, version)
    )


def whole_parameters(model: Any, version: int) -> Any:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if version == 2:
        assert isinstance(model, FSDPModule)
        return c.parameters_of(model)
    assert isinstance(model, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(model):
        return c.parameters_of(model)


def train_all(rank: int, world_size: int, folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    with accelerate_on_cpus():
        for version, cases in VERSIONS.items():
            for case in cases:
                found["Trainer", version, case] = with_trainer(rank, folder, case, version)
                found["Accelerate", version, case] = with_accelerate(rank, case, version)
            found["Trainer", version, "clipped"] = test_huggingface.train(
                rank, folder, CLIPPED, engine=trainer_engine(version), max_grad_norm=extras.MAX_NORM
            ).result
            found["Accelerate", version, "clipped"] = test_accelerate.train(
                rank,
                CLIPPED,
                engine=accelerate_engine(version),
                max_norm=extras.MAX_NORM,
                schedule=extras.falling,
            ).result
        found["smoothing"] = smoothing(rank, folder)
    return found


def smoothing(rank: int, folder: str) -> str:
    """FSDP2 changes the name of the model's class, by which the Trainer knows causal models."""
    return c.said(
        lambda: test_huggingface.train(
            rank,
            folder,
            c.Case(),
            engine=trainer_engine(2),
            make_model=extras.make_llama,
            label_smoothing_factor=0.1,
        )
    )


def with_trainer(
    rank: int, folder: str, case: c.Case, version: int
) -> tuple[c.RankResult, c.RankResult]:
    """With odb, and naively."""
    engine, naive = trainer_engine(version), test_huggingface.NAIVE_STEPS[case.accumulation]
    return (
        test_huggingface.train(rank, folder, case, engine=engine).result,
        test_huggingface.train(rank, folder, case, engine=engine, naive=naive).result,
    )


def with_accelerate(rank: int, case: c.Case, version: int) -> tuple[c.RankResult, c.RankResult]:
    """The same."""
    engine = accelerate_engine(version)
    return (
        test_accelerate.train(rank, case, engine=engine).result,
        test_accelerate.train(rank, case, engine=engine, naive=True).result,
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_as_torchrun(train_all, str(tmp_path_factory.mktemp("fsdp")), timeout=150)


def subject(trainer: str, version: int) -> c.Subject:
    return extras.subject_below(trainer, f"FSDP{version}")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("trainer", ["Trainer", "Accelerate"])
def test_conformance(ranks: Any, trainer: str, version: int) -> None:
    """Promise: exact-gradient."""
    checks.conform(
        subject(trainer, version),
        VERSIONS[version],
        exact=lambda case: [rank[trainer, version, case][0] for rank in ranks],
        naive=lambda case: [rank[trainer, version, case][1] for rank in ranks],
    )


def test_label_smoothing_that_would_not_shift_is_refused(ranks: Any) -> None:
    for rank in ranks:
        assert "label_smoothing_factor=0" in rank["smoothing"]


@pytest.mark.parametrize("version", VERSIONS)
def test_clipping_in_the_trainer(ranks: Any, version: int) -> None:
    results = [rank["Trainer", version, "clipped"] for rank in ranks]
    checks.clips(subject("Trainer", version), CLIPPED, results)


@pytest.mark.parametrize("version", VERSIONS)
def test_clipping_and_a_schedule_in_accelerate(ranks: Any, version: int) -> None:
    """FSDP2 gives the optimizer other parameters: the schedule must still be that optimizer's."""
    results = [rank["Accelerate", version, "clipped"] for rank in ranks]
    both = {"max_norm": extras.MAX_NORM, "schedule": extras.falling}
    expected = extras.reference(CLIPPED, results, **both)
    assert extras.difference(results, expected) <= 1e-6
    without = extras.reference(CLIPPED, results, max_norm=extras.MAX_NORM)
    assert extras.difference(results, without) > 1e-3
