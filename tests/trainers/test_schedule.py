"""Counts of a training, budgets, and learning rates: all of them against closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import odb
from odb.integrations.progress import Progress
from odb.integrations.schedule import (
    ScaledByBlock,
    by_samples,
    by_tokens,
    warmup_cosine,
    warmup_linear,
)
from odb.testing import run_ranks
from tests.trainers import conformance as suite
from tests.trainers.conformance import Case


def one_weight(lr: float = 1.0) -> tuple[torch.nn.Parameter, torch.optim.SGD]:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    weight.grad = -torch.ones_like(weight)
    return weight, torch.optim.SGD([weight], lr=lr)


def block(samples: int, tokens: int = 10, **fields: Any) -> odb.ODBStepInfo:
    return suite.make_info(
        global_samples=samples, global_tokens=tokens, block_samples=samples, block_tokens=tokens,
        **fields,
    )  # fmt: skip


# ---------------------------------------------------------------- on real ranks


def count(rank: int, world_size: int) -> dict[str, Any]:
    """Whole epochs, and three budgets, each with A=3."""
    found: dict[str, Any] = {}
    for name, limits in {
        "epochs": {},
        "samples": {"max_samples": 50},
        "tokens": {"max_tokens": 700},
        "optimizer steps": {"max_optimizer_steps": 6},
    }.items():
        loader = suite.make_loader(Case(3), rank)
        progress = Progress(samples_per_epoch=38, **limits)
        epochs = 0
        while not progress.done and epochs < 2:
            epochs += 1
            for _, info in loader.steps():
                progress.update(info)
                if progress.done:
                    break
        dist.barrier()
        loader.close()
        found[name] = (progress, progress.epochs, loader.infos)
    return found


def test_counts_are_true_and_budgets_end_all_ranks_at_the_same_step() -> None:
    first, second = run_ranks(count, 2, start_method="fork", timeout=60)
    for name, (progress, epochs, infos) in first.items():
        assert (progress, epochs) == second[name][:2]
        both = [*infos, *second[name][2]]
        assert len(infos) == len(second[name][2]) == progress.steps
        assert progress.samples == sum(info.local_samples for info in both)
        assert progress.tokens == sum(info.local_tokens for info in both)
        assert progress.weight == sum(info.local_weight for info in both)
        assert progress.optimizer_steps == sum(info.last_in_block for info in infos)
        assert infos[-1].last_in_block, "gradients were left over"
        last = infos[-1].block_samples
        if name == "samples":
            assert 50 <= progress.samples < 50 + last
        if name == "tokens":
            assert 700 <= progress.tokens < 700 + infos[-1].block_tokens
        if name == "optimizer steps":
            assert progress.optimizer_steps == 6
        if name == "epochs":
            assert progress.samples == 2 * len(suite.make_dataset())
            assert epochs == 2.0
            assert not progress.done


# ---------------------------------------------------------------- counts


def test_done_waits_for_the_end_of_a_block() -> None:
    progress = Progress(max_samples=4)
    for place, done in ((0, False), (1, False), (2, True)):
        progress.update(suite.make_info(global_samples=4, block_step=place, block_steps=3))
        assert progress.done == done
    assert (progress.steps, progress.optimizer_steps, progress.samples) == (3, 1, 12)


def test_parts_of_the_way() -> None:
    assert Progress().part is None
    assert Progress().epochs is None
    progress = Progress(max_samples=40, max_optimizer_steps=2, samples_per_epoch=20)
    progress.update(block(10, epoch=1))
    assert (progress.part, progress.epochs) == (0.5, 1.5)
    progress.update(block(50, epoch=2))
    assert (progress.part, progress.epochs, progress.done) == (1.0, 3.0, True)


def test_progress_goes_on_from_a_checkpoint() -> None:
    progress = Progress(max_samples=10, samples_per_epoch=20)
    progress.update(block(7, 70))
    resumed = Progress(max_samples=12, samples_per_epoch=20)
    resumed.load_state_dict(progress.state_dict())
    assert resumed.state_dict() == progress.state_dict()
    resumed.update(block(4, 40))
    assert (resumed.samples, resumed.tokens, resumed.done, resumed.epochs) == (11, 110, False, 0.55)
    with pytest.raises(odb.ConfigError, match=r"\['steps'\]"):
        resumed.load_state_dict({k: v for k, v in progress.state_dict().items() if k != "steps"})
    assert resumed.samples == 11


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "3"])
def test_impossible_limits_are_refused(limit: Any) -> None:
    with pytest.raises(odb.ConfigError, match="max_samples must be a whole number from 1"):
        Progress(max_samples=limit)


# ---------------------------------------------------------------- by samples


def test_a_schedule_by_samples_has_its_closed_form() -> None:
    """Whatever the sizes of the blocks are, and however often the scheduler is stepped."""
    for sizes, repeats in (((8, 8, 8, 8, 8), 1), ((1, 19, 5, 10, 5), 3)):
        _, optimizer = one_weight(lr=0.5)
        progress = Progress()
        schedule = by_samples(optimizer, progress, warmup_linear(10, 40, floor=0.1))
        assert optimizer.param_groups[0]["lr"] == 0.0
        seen = 0
        for size in sizes:
            optimizer.step()
            progress.update(block(size))
            for _ in range(repeats):
                schedule.step()
            seen += size
            expected = seen / 10 if seen < 10 else 0.1 + 0.9 * (40 - seen) / 30
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * expected)
            assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]


def test_a_schedule_by_tokens_and_a_cosine() -> None:
    _, optimizer = one_weight()
    progress = Progress()
    schedule = by_tokens(optimizer, progress, warmup_cosine(0, 100))
    for tokens in (25, 25, 50, 10):
        optimizer.step()
        progress.update(block(1, tokens))
        schedule.step()
        part = min(1.0, progress.tokens / 100)
        assert optimizer.param_groups[0]["lr"] == pytest.approx((1 + math.cos(math.pi * part)) / 2)


def test_a_schedule_by_samples_goes_on_from_a_checkpoint() -> None:
    _, optimizer = one_weight(lr=2.0)
    progress = Progress()
    schedule = by_samples(optimizer, progress, warmup_linear(0, 100))
    optimizer.step()
    progress.update(block(30))
    schedule.step()
    saved = progress.state_dict(), optimizer.state_dict(), schedule.state_dict()

    _, optimizer = one_weight(lr=2.0)
    progress = Progress()
    schedule = by_samples(optimizer, progress, warmup_linear(0, 100))
    for one, state in zip((progress, optimizer, schedule), saved, strict=True):
        one.load_state_dict(state)  # type: ignore[attr-defined]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.4)
    optimizer.step()
    progress.update(block(20))
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0)


def test_warmup_must_fit() -> None:
    for make in (warmup_linear, warmup_cosine):
        with pytest.raises(odb.ConfigError, match="warmup"):
            make(10, 10)
        factor = make(2, 10, floor=0.2)
        assert [factor(0), factor(1), factor(2)] == [0.0, 0.5, 1.0]
        assert factor(10) == factor(10**9) == pytest.approx(0.2)


# ---------------------------------------------------------------- by the size of a block


@pytest.mark.parametrize(("rule", "power"), [("linear", 1.0), ("sqrt", 0.5)])
@pytest.mark.parametrize("of", ["samples", "tokens", "weight"])
def test_rates_follow_the_size_of_a_block(rule: Any, power: float, of: Any) -> None:
    """One weight with a gradient of -1: after SGD steps it is the sum of the rates used."""
    weight, optimizer = one_weight(lr=0.1)
    scaled = ScaledByBlock(optimizer, base=8, rule=rule, of=of)
    expected = 0.0
    for size in (8, 2, 32, 5):
        scaled.update(suite.make_info(**{f"block_{of}": size}))
        optimizer.step()
        expected += 0.1 * (size / 8) ** power
        assert scaled.factor == pytest.approx((size / 8) ** power)
        assert optimizer.param_groups[0]["lr"] == 0.1
    assert weight.item() == pytest.approx(expected)
    scaled.remove()
    optimizer.step()
    assert weight.item() == pytest.approx(expected + 0.1)


def test_scaling_composes_with_any_scheduler() -> None:
    """Also with those that compute the next rate from the one they find, as cosine annealing."""
    for make in (lambda o: CosineAnnealingLR(o, 5), lambda o: StepLR(o, 2, gamma=0.3)):
        weight, optimizer = one_weight(lr=0.1)
        _, alone = one_weight(lr=0.1)
        scaled = ScaledByBlock(optimizer, base=4)
        schedule, expected_schedule = make(optimizer), make(alone)
        expected = 0.0
        for size in (4, 1, 9, 2, 2):
            scaled.update(block(size))
            optimizer.step()
            schedule.step()
            expected += alone.param_groups[0]["lr"] * size / 4
            alone.step()
            expected_schedule.step()
            assert schedule.get_last_lr() == expected_schedule.get_last_lr()
        assert weight.item() == pytest.approx(expected)


def test_a_step_that_raised_leaves_no_scaled_rate_behind() -> None:
    weight, optimizer = one_weight(lr=0.1)
    scaled = ScaledByBlock(optimizer, base=4)
    scaled.update(block(8))

    def closure() -> float:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="memory"):
        optimizer.step(closure)
    optimizer.step()
    assert weight.item() == pytest.approx(0.2)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_unknown_settings_are_refused() -> None:
    _, optimizer = one_weight()
    for settings in ({"base": 0}, {"base": 8, "rule": "cubic"}, {"base": 8, "of": "rows"}):
        with pytest.raises(odb.ConfigError):
            ScaledByBlock(optimizer, **settings)  # type: ignore[arg-type]
