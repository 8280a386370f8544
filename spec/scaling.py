"""The loss scale that makes the averaged gradient exact (promise: exact-gradient)."""

from __future__ import annotations


def loss_scale(world_size: int, local_weight: int, global_weight: int) -> float:
    """The factor for a rank's mean loss in one step.

    Data-parallel training averages gradients over ranks: (1/W) sum_r grad_r. With the factor
    `W * w_r / sum(w)` on the mean loss of rank r, that average is the gradient of
    `sum_r(w_r * mean_r) / sum(w)`: the mean over all loss-bearing tokens of the step, wherever
    they are. An idle rank has weight 0 and so contributes exactly nothing.
    """
    return world_size * local_weight / global_weight
