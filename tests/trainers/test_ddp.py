"""Plain DDP: the conformance suite, accumulation, Join, clipping, bf16, and misuse."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import odb
from odb.integrations import ddp
from odb.testing import run_ranks
from tests.trainers import checks
from tests.trainers import conformance as suite
from tests.trainers.conformance import Case, RankResult, Subject

SUBJECT = Subject("DDP", torch.__version__, extra_lines=3)
CLIPPED = Case(3, clip_norm=0.05)
BF16 = Case(3)


def train(rank: int, case: Case, *, how: str = "exact", **options: Any) -> RankResult:
    """how: "exact"; "bf16": the same under autocast; "naive": as one trains without odb, the mean
    loss of each rank, divided by the accumulation steps. options: of DDP."""
    loader = suite.make_loader(case, rank)
    model = DistributedDataParallel(suite.make_model(case.dtype), **options)
    optimizer = suite.make_optimizer(model.parameters())
    counter = suite.StepCounter(optimizer)
    ddp.check(model, loader)
    for _ in range(case.epochs):
        for batch in loader:
            info = odb.pop_step_info(batch)
            with ddp.accumulate(model, info):
                with torch.autocast("cpu", torch.bfloat16) if how == "bf16" else nullcontext():
                    loss = model(**batch)["loss"]
                scale = 1 / case.accumulation if how == "naive" else info.loss_scale
                (loss * scale).backward()
            if info.last_in_block:
                if case.clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
    loader.close()
    return RankResult(suite.parameters_of(model.module), counter.steps, loader.infos)


def train_all(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "exact": {case: train(rank, case) for case in suite.CASES},
        "naive": {case: train(rank, case, how="naive") for case in suite.CASES},
        "clipped": [train(rank, CLIPPED)],
        "static graph": [train(rank, Case(3), static_graph=True)],
        "bf16": [train(rank, BF16, how="bf16"), train(rank, BF16, how="exact")],
    }


def test_ddp_conforms() -> None:
    """Promise: exact-gradient, with and without accumulation, clipping and mixed precision."""
    ranks = run_ranks(train_all, 2, start_method="fork", timeout=100)
    checks.conform(
        SUBJECT,
        suite.CASES,
        exact=lambda case: [rank["exact"][case] for rank in ranks],
        naive=lambda case: [rank["naive"][case] for rank in ranks],
    )
    checks.clips(SUBJECT, CLIPPED, [rank["clipped"][0] for rank in ranks])
    suite.judge(SUBJECT, Case(3), [rank["static graph"][0] for rank in ranks])
    mixed, full = ([rank["bf16"][number].parameters for rank in ranks] for number in (0, 1))
    assert suite.largest_difference(mixed[0], mixed[1]) == 0.0
    assert 1e-6 < suite.largest_difference(mixed[0], full[0]) < 5e-3


def exchanges(rank: int, world_size: int) -> tuple[int, int, int]:
    """How often gradients cross, in steps and blocks of an epoch."""
    loader = suite.make_loader(Case(3), rank)
    model = DistributedDataParallel(suite.make_model())
    crossed = []

    def counting(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, not texts
        crossed.append(bucket.index())
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, counting)
    for batch, info in loader.steps():
        with ddp.accumulate(model, info):
            model(**batch)["loss"].backward()
    loader.close()
    return crossed.count(0), len(loader.infos), loader.infos[-1].block + 1


def test_gradients_cross_once_in_a_block() -> None:
    for crossed, steps, blocks in run_ranks(exchanges, 2, start_method="fork", timeout=60):
        assert crossed == blocks < steps


def evaluate(rank: int, world_size: int) -> list[float]:
    """The loss before training, after an epoch in the middle of which it is evaluated too."""
    model = DistributedDataParallel(suite.make_model(torch.float64))
    optimizer = suite.make_optimizer(model.parameters())
    train_loader = suite.make_loader(Case(3), rank)
    eval_loader = suite.make_loader(Case(), rank)

    def held_out_loss() -> float:
        total = torch.zeros(2, dtype=torch.float64)
        model.eval()
        with torch.no_grad():
            for batch in eval_loader:
                info = odb.pop_step_info(batch)
                total[0] += model(**batch)["loss"] * info.local_weight  # an idle step adds 0
                total[1] += info.local_weight
        model.train()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    losses = [held_out_loss()]
    for batch in train_loader:
        info = odb.pop_step_info(batch)
        with ddp.accumulate(model, info):
            (model(**batch)["loss"] * info.loss_scale).backward()
        if info.last_in_block:
            optimizer.step()
            optimizer.zero_grad()
            if info.block == 1:
                losses.append(held_out_loss())
    losses.append(held_out_loss())
    return losses


def test_evaluation_between_and_inside_of_epochs() -> None:
    """The mean over all label tokens, whatever the batches of the ranks are."""
    first, second = run_ranks(evaluate, 2, start_method="fork", timeout=60)
    assert first == second
    model = suite.make_model(torch.float64)
    dataset = suite.make_dataset()
    everything = odb.PadCollate()([dataset[i] for i in range(len(dataset))])
    assert abs(first[0] - model(**everything)["loss"].item()) < 1e-12
    assert first[0] > first[1] > first[2]


def drops_idle_backward(rank: int, world_size: int) -> None:
    loader = suite.make_loader(Case(), rank)
    model = DistributedDataParallel(suite.make_model())
    for batch, info in loader.steps():
        loss = model(**batch)["loss"] * info.loss_scale
        if not info.idle:
            loss.backward()


def test_a_dropped_idle_backward_cannot_pass() -> None:
    """It breaks the gradient exchange of the rank that still has samples."""
    results = run_ranks(drops_idle_backward, 2, start_method="fork", timeout=6, check=False)
    assert 0 in [failure.rank for failure in results.failures]


# ---------------------------------------------------------------- Join


STOPPING = Case(1)


def train_joined(rank: int, context: str) -> RankResult:
    loader = suite.make_loader(STOPPING, rank, idle="stop")
    model = DistributedDataParallel(suite.make_model())
    optimizer = suite.make_optimizer(model.parameters())
    counter = suite.StepCounter(optimizer)
    contexts = {
        "ours": lambda: ddp.joined(model, loader, optimizer),
        "bare": lambda: Join([model]),
        "over those left": lambda: Join([model], divide_by_initial_world_size=False),
    }
    for _ in range(STOPPING.epochs):
        with contexts[context]():
            for batch in loader:
                info = odb.pop_step_info(batch)
                optimizer.zero_grad()
                (model(**batch)["loss"] * info.loss_scale).backward()
                optimizer.step()
    loader.close()
    return RankResult(suite.parameters_of(model.module), counter.steps, loader.infos)


def train_all_joined(rank: int, world_size: int) -> dict[str, RankResult]:
    return {how: train_joined(rank, how) for how in ("ours", "bare", "over those left")}


def test_under_join_the_gradient_is_exact_over_epochs() -> None:
    """Rank 1 stops early and rank 0 goes on alone; then both begin the next epoch as one."""
    ranks = run_ranks(train_all_joined, 2, start_method="fork", timeout=60)
    gaps = {}
    for how in ranks[0]:
        results = [rank[how] for rank in ranks]
        assert results[1].optimizer_steps < results[0].optimizer_steps
        assert not any(info.idle for result in results for info in result.infos)
        expected = suite.reference(STOPPING, [result.infos for result in results])
        gaps[how] = max(suite.largest_difference(r.parameters, expected) for r in results)
    assert gaps["ours"] <= 1e-6
    assert gaps["bare"] > 1e-4, "momentum that stayed behind should have shown"
    assert gaps["over those left"] > 1e-3


def state_after_join(rank: int, world_size: int) -> list[tuple[Any, ...]]:
    """Tensors and numbers in an optimizer's state, a scheduler, and rank 1 without a step."""
    shards = (range(5), range(0))
    loader = suite.make_loader(Case(), rank, sampler=shards[rank], idle="stop")
    model = DistributedDataParallel(nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with ddp.joined(model, loader, optimizer, schedule):
        for _ in loader:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            schedule.step()
    loader.close()
    state = optimizer.state_dict()
    return [
        (s["step"].item(), s["exp_avg"].tolist(), s["exp_avg_sq"].tolist())
        for s in state["state"].values()
    ] + [(schedule.last_epoch, optimizer.param_groups[0]["lr"])]


def test_a_rank_that_never_stepped_takes_over_the_whole_state() -> None:
    first, second = run_ranks(state_after_join, 2, start_method="fork", timeout=60)
    assert first == second
    assert len(first) == 2
    steps = int(first[0][0])
    assert steps > 1
    assert first[1] == (steps, 0.5 * 0.5**steps)


# ---------------------------------------------------------------- misuse


def misuse(rank: int, world_size: int) -> list[str]:
    bare = nn.Linear(2, 2)
    model = DistributedDataParallel(bare)
    own = [dist.new_group([0]), dist.new_group([1])][rank]
    loader = partial(odb.ODBDataLoader, [{"input_ids": [1]}], token_budget=8)
    info = suite.make_info(block_steps=2)
    attempts: Iterable[Any] = (
        lambda: ddp.check(bare, loader()),
        lambda: ddp.accumulate(bare, info),  # type: ignore[arg-type]
        lambda: ddp.check(model, loader(group=own)),
        lambda: ddp.check(model, loader(group=None)),
        lambda: ddp.check(model, loader(loss_scaling="none")),
        lambda: ddp.check(model, loader(idle="stop")),
        lambda: ddp.check(model, torch.utils.data.DataLoader([1])),
        lambda: ddp.joined(model, loader()),
        lambda: Join([model, ddp.KeepAlike(model)], divide_by_initial_world_size=False),
        lambda: ddp.check(model, loader()),
        lambda: ddp.check(DistributedDataParallel(bare, process_group=own), loader(group=own)),
    )
    return [suite.said(attempt) for attempt in attempts]


def test_misuse_is_told_apart() -> None:
    for rank, errors in enumerate(run_ranks(misuse, 2, start_method="fork", timeout=60)):
        expected = [
            "Linear is no DistributedDataParallel",
            "Linear is no DistributedDataParallel",
            f"over the ranks 0, 1, but the loader aligns the ranks {rank}",
            f"over the ranks 0, 1, but the loader aligns the ranks {rank}",
            'loss_scaling="exact"',
            "without Join (see `joined`) needs a backward on every rank",
            "DataLoader is no odb.ODBDataLoader",
            'idle="pad"',
            "divide_by_initial_world_size=False",
            "no error",
            "no error",
        ]
        for said_so, words in zip(errors, expected, strict=True):
            assert words in said_so
