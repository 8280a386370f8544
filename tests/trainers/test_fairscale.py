"""FairScale: OSS under DDP and ShardedDDP on two processes; its FSDP needs CUDA.

FairScale is in an environment of its own: `make test-trainers`.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import odb
from odb.integrations.base import version_of
from odb.integrations.progress import Progress
from odb.testing import run_ranks
from tests.test_examples import torchrun
from tests.trainers import checks
from tests.trainers import conformance as suite
from tests.trainers.conformance import CASES, Case, RankResult, Subject, said

WAYS = ("OSS and DDP", "ShardedDDP", "ShardedDDP without buffers")
CLIPPED = Case(3, clip_norm=0.05)

needs_fairscale = pytest.mark.skipif(
    find_spec("fairscale") is None, reason="fairscale is not installed here: make test-trainers"
)


# ---------------------------------------------------------------- what the ranks do


def wrapped(way: str, case: Case, group: Any = None) -> tuple[Any, Any]:
    from fairscale.nn import ShardedDataParallel
    from fairscale.optim import OSS

    bare = suite.make_model(case.dtype)
    # As suite.make_optimizer, of which each rank has a part.
    optimizer = OSS(bare.parameters(), optim=torch.optim.SGD, group=group, lr=0.1, momentum=0.5)
    if way == "OSS and DDP":
        return DistributedDataParallel(bare, process_group=group), optimizer
    options = {"reduce_buffer_size": 0} if way.endswith("without buffers") else {}
    return ShardedDataParallel(bare, optimizer, process_group=group, **options), optimizer


def train(rank: int, way: str, case: Case, *, bf16: bool = False) -> RankResult:
    from odb.integrations.fairscale import FairScaleLoop

    loader = suite.make_loader(case, rank)
    model, optimizer = wrapped(way, case)
    counter = suite.StepCounter(optimizer)
    loop = FairScaleLoop(model, optimizer, loader, clip_norm=case.clip_norm)
    for _ in range(case.epochs):
        for batch, _info in loop:
            with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                loss = model(**batch)["loss"]
            loop.backward(loss)
            loop.step()
    loader.close()
    assert loop.progress.optimizer_steps == counter.steps
    assert loop.progress.samples == case.epochs * len(suite.make_dataset())
    return RankResult(suite.parameters_of(model.module), counter.steps, loader.infos)


def train_without_loop(rank: int, way: str, case: Case, *, scaled: bool) -> RankResult:
    """scaled: with the loss scale, and with the optimizer's zero_grad, as in most loops."""
    loader = suite.make_loader(case, rank)
    model, optimizer = wrapped(way, case)
    counter = suite.StepCounter(optimizer)
    for _ in range(case.epochs):
        for batch, info in loader.steps():
            with nullcontext() if info.last_in_block else model.no_sync():
                scale = info.loss_scale if scaled else 1 / case.accumulation
                (model(**batch)["loss"] * scale).backward()
            if info.last_in_block:
                optimizer.step()
                (optimizer if scaled else model).zero_grad()
    loader.close()
    return RankResult(suite.parameters_of(model.module), counter.steps, loader.infos)


def train_to_a_limit(rank: int) -> tuple[int, int, int]:
    """Two optimizer steps, though the epoch has more."""
    from odb.integrations.fairscale import FairScaleLoop

    loader = suite.make_loader(Case(3), rank)
    model, optimizer = wrapped("ShardedDDP", Case(3))
    counter = suite.StepCounter(optimizer)
    progress = Progress(max_optimizer_steps=2)
    loop = FairScaleLoop(model, optimizer, loader, progress=progress)
    while not progress.done:
        for batch, _info in loop:
            loop.backward(model(**batch)["loss"])
            loop.step()
    loader.close()
    return counter.steps, loop.progress.steps, progress.samples


def misuse(rank: int) -> list[tuple[str, str]]:
    """What was said, and what should be in it."""
    from odb.integrations.fairscale import FairScaleLoop

    own = [dist.new_group([0]), dist.new_group([1])][rank]
    loader = partial(odb.ODBDataLoader, [{"input_ids": [1]}], token_budget=8)
    sharded, optimizer = wrapped("ShardedDDP", Case())
    plain = suite.make_optimizer(sharded.module.parameters())
    of_own_group = wrapped("ShardedDDP", Case(), group=own)

    def zeroes(before_forward: bool) -> None:
        recorded = suite.make_loader(Case(), rank)
        try:
            for batch, _info in (loop := FairScaleLoop(sharded, optimizer, recorded)):
                if before_forward:
                    optimizer.zero_grad()
                loss = sharded(**batch)["loss"]
                if not before_forward:
                    optimizer.zero_grad()
                loop.backward(loss)
                loop.step()
        finally:
            recorded.close()

    return [
        (said(lambda: FairScaleLoop(sharded.module, optimizer, loader())), "no FairScale model"),
        (said(lambda: FairScaleLoop(sharded, plain, loader())), "OSS as its optimizer"),
        (said(lambda: FairScaleLoop(*of_own_group, loader())), "aligns the ranks 0, 1"),
        (said(lambda: FairScaleLoop(*of_own_group, loader(group=own))), "no error"),
        (said(lambda: FairScaleLoop(sharded, optimizer, loader(idle="stop"))), 'idle="pad"'),
        (said(lambda: zeroes(before_forward=False)), "leave out zero_grad()"),
        (said(lambda: zeroes(before_forward=True)), "leave out zero_grad()"),
    ]


def contract_of_fsdp(rank: int) -> dict[str, Any]:
    """FairScale's FSDP can be built on a CPU, but its forward needs CUDA streams. What the loop
    relies on is seen without one: it averages over all ranks, and has what the loop calls."""
    from fairscale.nn import FullyShardedDataParallel

    from odb.integrations.fairscale import FairScaleLoop

    model = FullyShardedDataParallel(suite.make_model(), compute_device=torch.device("cpu"))
    optimizer = suite.make_optimizer(model.parameters())
    loader = odb.ODBDataLoader([{"input_ids": [1]}], token_budget=8)
    own = [dist.new_group([0]), dist.new_group([1])][rank]
    other = odb.ODBDataLoader([{"input_ids": [1]}], token_budget=8, group=own)
    with model.no_sync():
        pass
    model.zero_grad(set_to_none=False)
    return {
        "divided by": model.gradient_predivide_factor * model.gradient_postdivide_factor,
        "clips": next(iter(inspect.signature(model.clip_grad_norm_).parameters)),
        "accepted": said(lambda: FairScaleLoop(model, optimizer, loader, clip_norm=1.0)),
        "refused": said(lambda: FairScaleLoop(model, optimizer, other)),
    }


def work(rank: int, world_size: int) -> dict[str, Any]:
    keys = [(way, case) for way in WAYS for case in CASES]
    return {
        "exact": {key: train(rank, *key) for key in keys},
        "naive": {key: train_without_loop(rank, *key, scaled=False) for key in keys},
        "clipped": {way: train(rank, way, CLIPPED) for way in WAYS},
        "bf16": {way: train(rank, way, Case(3), bf16=True) for way in WAYS},
        "trap": train_without_loop(rank, "ShardedDDP", Case(), scaled=True),
        "limited": train_to_a_limit(rank),
        "misuse": misuse(rank),
        "fsdp": contract_of_fsdp(rank),
    }


# ---------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    found = run_ranks(work, 2, start_method="fork", timeout=200)
    assert isinstance(found, list)
    return found


def subject(way: str) -> Subject:
    on_cpu = "yes; its FSDP needs CUDA: interface only"
    return Subject(f"FairScale {way}", version_of("fairscale"), on_cpu, extra_lines=2)


@needs_fairscale
@pytest.mark.parametrize("way", WAYS)
def test_every_way_conforms(ranks: list[dict[str, Any]], way: str) -> None:
    """Promise: exact-gradient. Counts of steps and samples are checked on the ranks."""
    checks.conform(
        subject(way),
        CASES,
        exact=lambda case: [rank["exact"][way, case] for rank in ranks],
        naive=lambda case: [rank["naive"][way, case] for rank in ranks],
    )


@needs_fairscale
@pytest.mark.parametrize("way", WAYS)
def test_clipping_is_over_all_shards(ranks: list[dict[str, Any]], way: str) -> None:
    checks.clips(subject(way), CLIPPED, [rank["clipped"][way] for rank in ranks])


@needs_fairscale
@pytest.mark.parametrize("way", WAYS)
def test_mixed_precision_is_close(ranks: list[dict[str, Any]], way: str) -> None:
    checks.is_close(Case(3), [rank["bf16"][way] for rank in ranks], most=5e-3)


@needs_fairscale
def test_the_optimizers_zero_grad_is_silently_wrong(ranks: list[dict[str, Any]]) -> None:
    """What the loop saves its users from."""
    gap = suite.difference_of(subject("ShardedDDP"), Case(), [rank["trap"] for rank in ranks])
    assert gap > 1e-2


@needs_fairscale
def test_a_limit_ends_training_on_all_ranks_at_the_end_of_a_block(
    ranks: list[dict[str, Any]],
) -> None:
    assert ranks[0]["limited"] == ranks[1]["limited"]
    steps, batches, samples = ranks[0]["limited"]
    infos = ranks[0]["exact"]["ShardedDDP", Case(3)].infos
    assert (steps, batches) == (2, 6)
    assert samples == sum(info.global_samples for info in infos[:6])


@needs_fairscale
def test_misuse_is_told_apart(ranks: list[dict[str, Any]]) -> None:
    checks.is_said(ranks)


@needs_fairscale
def test_fsdp_has_what_the_loop_relies_on(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        found = rank["fsdp"]
        assert found["divided by"] == 2
        assert found["clips"] == "max_norm"
        assert found["accepted"] == "no error"
        assert f"aligns the ranks {number}" in found["refused"]


@needs_fairscale
def test_the_example_runs() -> None:
    assert "epoch 1 rank 0" in torchrun("train_fairscale.py")


@pytest.mark.skipif(find_spec("fairscale") is not None, reason="fairscale is installed")
def test_without_fairscale_the_extra_is_named() -> None:
    from odb.integrations.fairscale import FairScaleLoop

    with pytest.raises(odb.MissingDependencyError, match=r"verified-odb\[fairscale\]"):
        FairScaleLoop(nn.Linear(2, 2), None, None)
