"""FSDP2 on a CPU mesh: the conformance suite, accumulation, hybrid sharding, clipping, bf16."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import odb
from odb.integrations import fsdp2
from odb.testing import run_ranks
from tests.test_examples import torchrun
from tests.trainers import checks
from tests.trainers import conformance as suite
from tests.trainers.conformance import Case, RankResult, Subject

SUBJECT = Subject("FSDP2", torch.__version__, extra_lines=3)
CLIPPED = Case(3, clip_norm=0.05)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(mesh: DeviceMesh, dtype: torch.dtype, **options: Any) -> nn.Module:
    model = suite.make_model(dtype)
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(rank: int, case: Case, mesh: DeviceMesh, how: str = "exact") -> RankResult:
    """how: "exact"; "every step": gradients are exchanged in every step; "bf16"; "naive"."""
    loader = suite.make_loader(case, rank)
    options = {"mp_policy": BF16} if how == "bf16" else {}
    model = sharded(mesh, case.dtype, **options)
    optimizer = suite.make_optimizer(model.parameters())
    counter = suite.StepCounter(optimizer)
    fsdp2.check(model, loader)
    for _ in range(case.epochs):
        for batch in loader:
            info = odb.pop_step_info(batch)
            scale = 1 / case.accumulation if how == "naive" else info.loss_scale
            if how == "every step":
                (model(**batch)["loss"] * scale).backward()
            else:
                with fsdp2.accumulate(model, info):
                    (model(**batch)["loss"] * scale).backward()
                gradient = next(iter(model.parameters())).grad
                if not info.last_in_block:
                    assert gradient is None, "gradients were exchanged inside of a block"
            if info.last_in_block:
                if case.clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
    loader.close()
    return RankResult(suite.parameters_of(model), counter.steps, loader.infos)


def train_all(rank: int, world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return {
        "exact": {case: train(rank, case, mesh) for case in suite.CASES},
        "naive": {case: train(rank, case, mesh, "naive") for case in suite.CASES},
        "clipped": [train(rank, CLIPPED, mesh)],
        "every step": [train(rank, Case(3), mesh, "every step")],
        "hybrid": [train(rank, Case(3), hybrid)],
        "bf16": [train(rank, Case(3), mesh, "bf16")],
    }


def test_fsdp2_conforms() -> None:
    """Promise: exact-gradient, with and without accumulation, clipping and mixed precision."""
    ranks = run_ranks(train_all, 2, start_method="fork", timeout=120)
    checks.conform(
        SUBJECT,
        suite.CASES,
        exact=lambda case: [rank["exact"][case] for rank in ranks],
        naive=lambda case: [rank["naive"][case] for rank in ranks],
    )
    suite.judge(SUBJECT, CLIPPED, [rank["clipped"][0] for rank in ranks])
    suite.judge(SUBJECT, Case(3), [rank["every step"][0] for rank in ranks])
    suite.judge(SUBJECT, Case(3), [rank["hybrid"][0] for rank in ranks])
    mixed = [rank["bf16"][0] for rank in ranks]
    assert suite.largest_difference(mixed[0].parameters, mixed[1].parameters) == 0.0
    exact = suite.reference(Case(3), [result.infos for result in mixed])
    assert 1e-6 < suite.largest_difference(mixed[0].parameters, exact) < 5e-3


def test_the_example() -> None:
    printed = torchrun("train_fsdp2.py")
    row = r"epoch (\d) rank (\d): (\d+) steps, (\d+) of the optimizer, (\d+) samples"
    rows = re.findall(row, printed)
    assert len(rows) == 4
    for epoch in "01":
        counts = {tuple(map(int, rest)) for e, _, *rest in rows if e == epoch}
        ((steps, optimizer_steps, _),) = counts
        assert steps / 2 <= optimizer_steps < steps
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", printed)]
    assert max(losses[2:]) < min(losses[:2])


def misuse(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    model = sharded(mesh, torch.float32)
    own = [dist.new_group([0]), dist.new_group([1])][rank]
    loader = partial(odb.ODBDataLoader, [{"input_ids": [1]}], token_budget=8)
    frozen = suite.make_model()
    fully_shard(frozen, mesh=mesh, ignored_params=set(frozen.parameters()))
    info = suite.make_info(block_steps=2)

    def accumulate() -> None:
        with fsdp2.accumulate(nn.Linear(1, 1), info):
            pass

    attempts: tuple[Any, ...] = (
        lambda: fsdp2.check(suite.make_model(), loader()),
        accumulate,
        lambda: fsdp2.check(frozen, loader()),
        lambda: fsdp2.check(model, loader(group=own)),
        lambda: fsdp2.check(model, loader(loss_scaling="none")),
        lambda: fsdp2.check(model, loader(idle="stop")),
        lambda: fsdp2.check(model, [1, 2]),
        lambda: fsdp2.check(model, loader(), mesh),
    )
    return [suite.said(attempt) for attempt in attempts]


def test_misuse_is_told_apart() -> None:
    for rank, errors in enumerate(run_ranks(misuse, 2, start_method="fork", timeout=60)):
        expected = [
            "fully_shard was not applied to this CausalModel",
            "fully_shard was not applied to this Linear",
            "no sharded parameters",
            f"over the ranks 0, 1, but the loader aligns the ranks {rank}",
            'loss_scaling="exact"',
            'build it with idle="pad"',
            "list is no odb.ODBDataLoader",
            "no error",
        ]
        for said_so, words in zip(errors, expected, strict=True):
            assert words in said_so
