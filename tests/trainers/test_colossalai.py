"""Colossal-AI: TorchDDPPlugin and LowLevelZeroPlugin through the Booster; Gemini's contract.

Colossal-AI is in an environment of its own: `make test-trainers`. LowLevelZero refuses to run
without a GPU; it is told that the CPU is one, through the framework's own `set_accelerator`.
Gemini's optimizers need compiled kernels, so that only its plugin's interface is tested.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
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

WAYS = ("TorchDDP", "LowLevelZero 1", "LowLevelZero 2")
CLIPPED = Case(3, clip_norm=0.05)
SHIM = "yes, with an accelerator that calls the CPU a GPU; Gemini: interface only"

needs_colossalai = pytest.mark.skipif(
    find_spec("colossalai") is None, reason="colossalai is not installed here: make test-trainers"
)


# ---------------------------------------------------------------- what the ranks do


def pretend_that_the_cpu_is_a_gpu() -> None:
    from colossalai.accelerator import set_accelerator
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator

    class CpuAsGpu(CpuAccelerator):  # type: ignore[misc]
        @property
        def name(self) -> str:
            return "cuda"

        def stream(self, stream: Any) -> AbstractContextManager[None]:
            return nullcontext()

        def Stream(self, *arguments: Any, **options: Any) -> None:
            return None

        def current_stream(self, device: Any = None) -> None:
            return None

    set_accelerator(CpuAsGpu())


def boosted(way: str, case: Case, precision: str = "fp32") -> tuple[Any, ...]:
    """A booster, a model, its optimizer, and what counts the optimizer's steps."""
    from colossalai.booster import Booster
    from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin

    if way == "TorchDDP":
        plugin = TorchDDPPlugin()
    else:
        plugin = LowLevelZeroPlugin(
            stage=int(way[-1]),
            precision=precision,
            overlap_communication=False,  # it needs streams
            max_norm=case.clip_norm or 0.0,
        )
    booster = Booster(plugin=plugin)
    bare = suite.make_model(case.dtype)
    optimizer = suite.make_optimizer(bare.parameters())
    counter = suite.StepCounter(optimizer)
    model, optimizer, *_ = booster.boost(bare, optimizer)
    return booster, model, optimizer, counter


def train(rank: int, way: str, case: Case, precision: str = "fp32") -> RankResult:
    from odb.integrations.colossalai import ColossalAILoop

    loader = suite.make_loader(case, rank)
    booster, model, optimizer, counter = boosted(way, case, precision)
    clip_norm = case.clip_norm if way == "TorchDDP" else None
    loop = ColossalAILoop(booster, model, optimizer, loader, clip_norm=clip_norm)
    for _ in range(case.epochs):
        for batch, _info in loop:
            loop.backward(model(**batch)["loss"])
            loop.step()
    loader.close()
    assert loop.progress.optimizer_steps == counter.steps
    assert loop.progress.samples == case.epochs * len(suite.make_dataset())
    return RankResult(suite.parameters_of(model.unwrap()), counter.steps, loader.infos)


def train_naively(rank: int, way: str, case: Case) -> RankResult:
    """The mean of each rank's batch, divided by the accumulation steps, in blocks of full size."""
    loader = suite.make_loader(case, rank)
    booster, model, optimizer, counter = boosted(way, case)
    for _ in range(case.epochs):
        for number, (batch, _info) in enumerate(loader.steps(), 1):
            booster.backward(model(**batch)["loss"] / case.accumulation, optimizer)
            if number % case.accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
    loader.close()
    return RankResult(suite.parameters_of(model.unwrap()), counter.steps, loader.infos)


def misuse(rank: int) -> list[tuple[str, str]]:
    """What was said, and what should be in it."""
    from colossalai.booster import Booster
    from colossalai.booster.plugin import GeminiPlugin, HybridParallelPlugin

    from odb.integrations.colossalai import ColossalAILoop, check_booster

    own = [dist.new_group([0]), dist.new_group([1])][rank]
    loader = partial(odb.ODBDataLoader, [{"input_ids": [1]}], token_budget=8)
    booster, model, optimizer, _ = boosted("TorchDDP", Case())
    zero, *of_zero, _ = boosted("LowLevelZero 1", Case())
    bare = suite.make_model()
    plain = suite.make_optimizer(bare.parameters())
    gemini = partial(GeminiPlugin, precision="bf16", placement_policy="static")

    def loop_of_gemini(**options: Any) -> str:
        """Boosting needs its kernels, but what odb asks of the plugin is known before."""
        booster = Booster(plugin=gemini(**options))
        blocks = loader(accumulation_steps=3)
        return said(lambda: ColossalAILoop(booster, model, optimizer, blocks))

    parallel = Booster(plugin=HybridParallelPlugin(tp_size=1, pp_size=1, precision="fp32"))
    return [
        (said(lambda: check_booster(None, model, optimizer)), "no colossalai Booster"),
        (said(lambda: check_booster(Booster(), model, optimizer)), "no plugin"),
        (said(lambda: check_booster(parallel, model, optimizer)), "whose averages odb knows"),
        (said(lambda: check_booster(booster, bare, optimizer)), "model is a bare CausalModel"),
        (said(lambda: check_booster(booster, model, plain)), "optimizer is a bare SGD"),
        (said(lambda: ColossalAILoop(booster, model, optimizer, loader())), "no error"),
        (
            said(lambda: ColossalAILoop(booster, model, optimizer, loader(group=own))),
            f"aligns the ranks {rank}",
        ),
        (
            said(lambda: ColossalAILoop(booster, model, optimizer, loader(idle="stop"))),
            'idle="pad"',
        ),
        (
            said(lambda: ColossalAILoop(zero, *of_zero, loader(), clip_norm=1.0)),
            "pass it max_norm= in place of clip_norm=",
        ),
        (loop_of_gemini(), "enable_gradient_accumulation=True"),
        (loop_of_gemini(enable_gradient_accumulation=True), "no error"),
        (loop_of_gemini(tp_size=2), "tp_size=1"),
    ]


def work(rank: int, world_size: int) -> dict[str, Any]:
    keys = [(way, case) for way in WAYS for case in FLOAT32_CASES]
    plain = {key: train(rank, *key) for key in keys if key[0] == "TorchDDP"}
    pretend_that_the_cpu_is_a_gpu()
    return {
        "exact": plain | {key: train(rank, *key) for key in keys if key[0] != "TorchDDP"},
        "naive": {key: train_naively(rank, *key) for key in keys},
        "clipped": {way: train(rank, way, CLIPPED) for way in WAYS},
        "bf16": {way: train(rank, way, Case(3), "bf16") for way in WAYS[1:]},
        "misuse": misuse(rank),
    }


# ---------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    found = run_ranks(work, 2, start_method="fork", timeout=200)
    assert isinstance(found, list)
    return found


def subject(way: str) -> Subject:
    on_cpu = "yes" if way == "TorchDDP" else SHIM
    return Subject(f"Colossal-AI {way}", version_of("colossalai"), on_cpu, extra_lines=2)


@needs_colossalai
@pytest.mark.parametrize("way", WAYS)
def test_every_plugin_conforms(ranks: list[dict[str, Any]], way: str) -> None:
    """Promise: exact-gradient. Counts of steps and samples are checked on the ranks."""
    checks.conform(
        subject(way),
        FLOAT32_CASES,
        exact=lambda case: [rank["exact"][way, case] for rank in ranks],
        naive=lambda case: [rank["naive"][way, case] for rank in ranks],
    )


@needs_colossalai
@pytest.mark.parametrize("way", WAYS)
def test_clipping_sees_the_exact_gradient(ranks: list[dict[str, Any]], way: str) -> None:
    checks.clips(subject(way), CLIPPED, [rank["clipped"][way] for rank in ranks])


@needs_colossalai
@pytest.mark.parametrize("way", WAYS[1:])
def test_bf16_is_close(ranks: list[dict[str, Any]], way: str) -> None:
    checks.is_close(Case(3), [rank["bf16"][way] for rank in ranks], most=1e-2)


@needs_colossalai
def test_misuse_is_told_apart(ranks: list[dict[str, Any]]) -> None:
    checks.is_said(ranks)


@needs_colossalai
def test_the_example_runs() -> None:
    assert "epoch 1 rank 0" in torchrun("train_colossalai.py")


@pytest.mark.skipif(find_spec("colossalai") is not None, reason="colossalai is installed")
def test_without_colossalai_the_extra_is_named() -> None:
    from odb.integrations.colossalai import check_booster

    with pytest.raises(odb.MissingDependencyError, match=r"verified-odb\[colossalai\]"):
        check_booster(None, nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)]))
