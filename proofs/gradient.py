"""With the loss scale, the averaged gradient is that of the mean over all weights, exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model_check.prover import Obligation, Source, both
from proofs import blocks
from proofs.theorem import Theorem
from spec import scaling


@dataclass(frozen=True)
class Scaling:
    """The function that this theorem is about."""

    loss_scale: Callable[[Any, Any, Any], Any] = scaling.loss_scale


SHIPPED = Scaling()


def _numbers(source: Source) -> tuple[Any, Any, Any, Any]:
    world_size, weight = source.real("W"), source.real("weight")
    total, gradient = source.real("total"), source.real("gradient of the mean loss")
    source.assume(both(world_size >= 1, weight >= 0, total > 0))
    return world_size, weight, total, gradient


def _share(source: Source, f: Scaling) -> Callable[[], Any]:
    world_size, weight, total, gradient = _numbers(source)

    def claim() -> Any:
        contributed = f.loss_scale(world_size, weight, total) * gradient / world_size
        return contributed * total == weight * gradient

    return claim


def _sum(source: Source, f: Scaling) -> Callable[[], Any]:
    """`average`: the averaged gradient of the ranks so far; `summed`: their weighted sum."""
    world_size, weight, total, gradient = _numbers(source)
    average, summed = source.real("average so far"), source.real("weighted sum so far")
    source.assume(average * total == summed)

    def claim() -> Any:
        after = average + f.loss_scale(world_size, weight, total) * gradient / world_size
        return after * total == summed + weight * gradient

    return claim


def _idle(source: Source, f: Scaling) -> Callable[[], Any]:
    world_size, _, total, gradient = _numbers(source)
    return lambda: f.loss_scale(world_size, 0, total) * gradient == 0


def _not_at_all(world_size: Any, weight: Any, total: Any) -> Any:
    return 1


def _without_world(world_size: Any, weight: Any, total: Any) -> Any:
    return weight / total


def _at_least_a_little(world_size: Any, weight: Any, total: Any) -> Any:
    return world_size * (weight + 1) / total


THEOREM = Theorem(
    promise="exact-gradient",
    states=(
        "For any number of ranks, any non-negative weights of which one is positive, and any "
        "gradients: the average over ranks of loss scale times gradient of the local mean loss is "
        "the gradient of the weighted mean over all ranks. Idle ranks contribute nothing. The same "
        "holds over a block of steps whose losses are scaled by the block's total; and each step "
        "of a block, the last and shorter one of an epoch included, is told that total."
    ),
    assumes=(
        "Real numbers. The trainer averages gradients over W ranks, and its loss is the mean over "
        "the weights that `loss_weight_fn` counts. Totals are the sums of what ranks contribute."
    ),
    reasoning=(
        "Each rank (and each step of a block) contributes weight * gradient / total. By induction "
        "over ranks and steps the contributions add up to the weighted sum over the total, which "
        "is the weighted mean. The total is positive because every sample weighs at least 1 and "
        "some rank has one in every step. Blocks are a fold over the steps as they are decided on, "
        "of whatever rounds: each step joins those that wait, or completes their block."
    ),
    leaves_out=(
        "Floating-point rounding (real jobs are compared to 1e-9 in float64 by tests). The places "
        "of steps in blocks of more than five; their totals are proved for any number."
    ),
    obligations=(
        Obligation(
            "share",
            "a rank contributes its weight times its gradient over the total",
            _share,
            SHIPPED,
            {"no scale": Scaling(_not_at_all), "no world size": Scaling(_without_world)},
        ),
        Obligation(
            "sum, induction step",
            "one rank more keeps the average equal to the weighted sum over the total",
            _sum,
            SHIPPED,
            {"no scale": Scaling(_not_at_all)},
        ),
        Obligation(
            "idle",
            "a rank of weight 0 contributes nothing, whatever its gradient",
            _idle,
            SHIPPED,
            {"a little is always added": Scaling(_at_least_a_little)},
        ),
        *blocks.OBLIGATIONS,
    ),
)
