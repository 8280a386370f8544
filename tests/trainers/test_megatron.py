"""Megatron-core: its DDP, schedules, finalize_model_grads and optimizers, under `cpu_shim`.

Megatron is in an environment of its own: `make test-trainers`.
"""

from __future__ import annotations

from contextlib import nullcontext
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
from tests.trainers.conformance import CASES, FLOAT32_CASES, Case, RankResult, Subject, said
from tests.trainers.cpu_shim import cuda_means_cpu

CLIPPED = Case(3, clip_norm=0.05)
PER_TOKEN = "per-token loss"
SCALED = "loss scale"
SHIM = "yes, with a shim (tests/trainers/cpu_shim.py): it asks for CUDA devices by name"

needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed here: make test-trainers"
)


# ---------------------------------------------------------------- what the ranks do


def build(case: Case, way: str = SCALED, **options: Any) -> tuple[Any, Any]:
    """A model in Megatron's DDP, and Megatron's optimizer for it. options: of OptimizerConfig."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import MegatronModule, TransformerConfig

    class Wrapped(MegatronModule):  # type: ignore[misc]
        def __init__(self, config: TransformerConfig) -> None:
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            self.bare = suite.make_model(case.dtype)

        def set_input_tensor(self, tensor: Any) -> None:
            """Nothing: all layers are in one stage."""

        def forward(self, **batch: Any) -> Any:
            return self.bare(**batch)["loss"]

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=suite.WIDTH,
        num_attention_heads=1,
        calculate_per_token_loss=way == PER_TOKEN,
        finalize_model_grads_func=finalize_model_grads,
    )
    settings = {"optimizer": "sgd", "lr": 0.1, "sgd_momentum": 0.5, "weight_decay": 0.0}
    settings |= {"clip_grad": case.clip_norm or 0.0, **options}
    distributed = bool(settings.get("use_distributed_optimizer", False))
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=distributed),
        Wrapped(config),
    )
    return model, get_megatron_optimizer(OptimizerConfig(**settings), [model])


def train(rank: int, case: Case, way: str, *, bf16: bool = False, **options: Any) -> RankResult:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from odb.integrations.megatron import MegatronBlocks

    loader = suite.make_loader(case, rank)
    model, optimizer = build(case, way, **options)
    counter = suite.StepCounter(optimizer.chained_optimizers[0].optimizer)
    # A constant rate, to see what it counts.
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.1,
        max_lr=0.1,
        min_lr=0.1,
        lr_warmup_steps=0,
        lr_decay_steps=1000,
        lr_decay_style="constant",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    blocks = MegatronBlocks(model, loader)

    def forward_step(data_iterator: Any, module: Any) -> Any:
        batch, info = next(data_iterator)
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            loss = module(**batch)
        return loss, lambda mean: blocks.loss(mean, info, {"lm loss": mean.detach()})

    for _ in range(case.epochs):
        for block in blocks:
            model.zero_grad_buffer()
            optimizer.zero_grad()
            logged = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=block.iterator(),
                model=model,
                num_microbatches=block.microbatches,
                seq_length=block.longest,
                micro_batch_size=1,
                forward_only=False,
            )
            assert len(logged) == block.microbatches
            optimizer.step()
            scheduler.step(increment=block.samples)
    loader.close()
    assert scheduler.num_steps == case.epochs * len(suite.make_dataset())
    return RankResult(suite.parameters_of(model.module), counter.steps, loader.infos)


def train_naively(rank: int, case: Case) -> RankResult:
    """Megatron's default: the mean of each micro-batch, averaged over micro-batches and ranks."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    loader = suite.make_loader(case, rank)
    model, optimizer = build(case)
    counter = suite.StepCounter(optimizer.chained_optimizers[0].optimizer)

    def forward_step(data_iterator: Any, module: Any) -> Any:
        batch, _info = next(data_iterator)
        return module(**batch), lambda mean: (mean.clone(), {})

    for _ in range(case.epochs):
        steps = loader.steps()
        held = list(steps)
        for start in range(0, len(held), case.accumulation):
            taken = held[start : start + case.accumulation]
            model.zero_grad_buffer()
            optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(taken),
                model=model,
                num_microbatches=len(taken),
                seq_length=1,
                micro_batch_size=1,
                forward_only=False,
            )
            optimizer.step()
    loader.close()
    return RankResult(suite.parameters_of(model.module), counter.steps, loader.infos)


def misuse(rank: int) -> list[tuple[str, str]]:
    """What was said, and what should be in it. Both ranks do the same."""
    from odb.integrations.megatron import MegatronBlocks, check_config

    own = [dist.new_group([0]), dist.new_group([1])][rank]
    loader = partial(odb.ODBDataLoader, [{"input_ids": [1]}], token_budget=8)
    model, _ = build(Case())
    good = model.config

    def changed(**values: Any) -> Any:
        from copy import copy

        config = copy(good)
        for name, value in values.items():
            setattr(config, name, value)
        return config

    def takes(count: int) -> None:
        recorded = suite.make_loader(Case(3), rank)
        try:
            for block in MegatronBlocks(model, recorded):
                assert block.microbatches == 3
                iterator = block.iterator()
                for _ in range(count):
                    next(iterator)
        finally:
            recorded.close()

    def skips() -> None:
        recorded = suite.make_loader(Case(3), rank)
        try:
            for _ in MegatronBlocks(model, recorded):
                pass
        finally:
            recorded.close()

    per_token = changed(context_parallel_size=2, calculate_per_token_loss=True)
    return [
        (said(lambda: check_config(good)), "no error"),
        (said(lambda: check_config(per_token)), "no error"),
        (
            said(lambda: check_config(changed(finalize_model_grads_func=None))),
            "set finalize_model_grads_func",
        ),
        (
            said(lambda: check_config(changed(pipeline_model_parallel_size=2))),
            "variable_seq_lengths=True",
        ),
        (
            said(lambda: check_config(changed(context_parallel_size=2))),
            "calculate_per_token_loss=True",
        ),
        (said(lambda: MegatronBlocks(model, loader())), "no error"),
        (said(lambda: MegatronBlocks(model, loader(group=own))), f"aligns the ranks {rank}"),
        (said(lambda: MegatronBlocks(model, loader(loss_scaling="none"))), '"exact"'),
        (said(lambda: MegatronBlocks(model, loader(idle="stop"))), 'idle="pad"'),
        (said(lambda: MegatronBlocks(model, [])), "no odb.ODBDataLoader"),
        (said(lambda: takes(2)), "of 3 micro-batches 2 were taken"),
        (said(lambda: takes(4)), "one more was asked for"),
        (said(skips), "a block was skipped"),
    ]


def work(rank: int, world_size: int) -> dict[str, Any]:
    from odb.integrations.megatron import MegatronBlocks

    model = nn.Linear(2, 2)
    early = said(lambda: MegatronBlocks(model, None))
    adam = {"optimizer": "adam"}
    with cuda_means_cpu():
        return {
            SCALED: {case: train(rank, case, SCALED) for case in CASES},
            PER_TOKEN: {case: train(rank, case, PER_TOKEN) for case in FLOAT32_CASES},
            "naive": {case: train_naively(rank, case) for case in CASES},
            "clipped": {way: train(rank, CLIPPED, way) for way in (SCALED, PER_TOKEN)},
            "bf16": {way: train(rank, Case(3), way, bf16=True) for way in (SCALED, PER_TOKEN)},
            "adam": [
                train(rank, Case(3), SCALED, use_distributed_optimizer=distributed, **adam)
                for distributed in (False, True)
            ],
            "misuse": [(early, "initialize_model_parallel()"), *misuse(rank)],
        }


# ---------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    found = run_ranks(work, 2, start_method="fork", timeout=200)
    assert isinstance(found, list)
    return found


def subject(way: str) -> Subject:
    return Subject(f"Megatron-core, {way}", version_of("megatron-core"), SHIM, extra_lines=3)


@needs_megatron
@pytest.mark.parametrize("way", [SCALED, PER_TOKEN])
def test_both_normalizations_conform(ranks: list[dict[str, Any]], way: str) -> None:
    """Promise: exact-gradient. Megatron's own division is in float32, also for float64 models, so
    that per-token loss is compared in float32 only."""
    checks.conform(
        subject(way),
        ranks[0][way],
        exact=lambda case: [rank[way][case] for rank in ranks],
        naive=lambda case: [rank["naive"][case] for rank in ranks],
    )


@needs_megatron
@pytest.mark.parametrize("way", [SCALED, PER_TOKEN])
def test_clipping_sees_the_exact_gradient(ranks: list[dict[str, Any]], way: str) -> None:
    checks.clips(subject(way), CLIPPED, [rank["clipped"][way] for rank in ranks])


@needs_megatron
@pytest.mark.parametrize("way", [SCALED, PER_TOKEN])
def test_mixed_precision_is_close(ranks: list[dict[str, Any]], way: str) -> None:
    checks.is_close(Case(3), [rank["bf16"][way] for rank in ranks], most=5e-3)


@needs_megatron
def test_the_distributed_optimizer_takes_the_same_steps(ranks: list[dict[str, Any]]) -> None:
    """It knows Adam only. Adam hides the size of gradients, so that this shows no more than that
    sharding changes nothing."""
    for rank in ranks:
        whole, sharded = (result.parameters for result in rank["adam"])
        assert suite.largest_difference(whole, sharded) <= 1e-6
        assert suite.largest_difference(whole, suite.parameters_of(suite.make_model())) > 0.1


@needs_megatron
def test_misuse_is_told_apart(ranks: list[dict[str, Any]]) -> None:
    checks.is_said(ranks)


@needs_megatron
def test_the_example_runs() -> None:
    assert "epoch 1 rank 0" in torchrun("train_megatron.py")


@pytest.mark.skipif(find_spec("megatron") is not None, reason="megatron-core is installed")
def test_without_megatron_the_extra_is_named() -> None:
    from odb.integrations.megatron import MegatronBlocks

    with pytest.raises(odb.MissingDependencyError, match=r"verified-odb\[megatron\]"):
        MegatronBlocks(nn.Linear(2, 2), None)
