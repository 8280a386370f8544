"""Learning rates by samples or tokens seen, and by the size of each block.

The number of steps of an epoch is not known before its end, so a schedule that needs it has nothing
to go by; the number of samples is. And blocks hold a varying number of samples, which a learning
rate can follow. Both work with any torch optimizer, also one that a framework steps.

    progress = Progress(max_samples=total)
    schedule = by_samples(optimizer, progress, warmup_cosine(total // 20, total))
    scaled = ScaledByBlock(optimizer, base=64, rule="sqrt")
    ...
        progress.update(info)
        scaled.update(info)
        if info.last_in_block:
            optimizer.step()
            schedule.step()
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from odb.errors import ConfigError
from odb.info import ODBStepInfo
from odb.integrations.progress import Progress

__all__ = ["ScaledByBlock", "by_samples", "by_tokens", "warmup_cosine", "warmup_linear"]

Factor = Callable[[int], float]
"""What the optimizer's learning rates are multiplied by, of a count."""


def by_samples(optimizer: Optimizer, progress: Progress, factor: Factor) -> LambdaLR:
    """A scheduler that multiplies the learning rates by `factor(progress.samples)`.

    Update the progress before each `step()` of the scheduler. How often `step` is called makes no
    difference, so frameworks that call it once for each process or each micro-batch do no harm.
    A checkpoint needs the progress besides the scheduler's and the optimizer's own state.
    """
    return LambdaLR(optimizer, lambda _: factor(progress.samples))


def by_tokens(optimizer: Optimizer, progress: Progress, factor: Factor) -> LambdaLR:
    """The same of `progress.tokens`."""
    return LambdaLR(optimizer, lambda _: factor(progress.tokens))


def warmup_linear(warmup: int, total: int, floor: float = 0.0) -> Factor:
    """From 0 to 1 over the first `warmup`, then straight down to `floor` at `total`, and there on.

    Raises ConfigError unless 0 <= warmup < total.
    """
    return _warm(warmup, total, lambda part: floor + (1.0 - floor) * (1.0 - part))


def warmup_cosine(warmup: int, total: int, floor: float = 0.0) -> Factor:
    """The same along half a cosine."""
    return _warm(
        warmup, total, lambda part: floor + (1.0 - floor) * (1.0 + math.cos(math.pi * part)) / 2
    )


def _warm(warmup: int, total: int, decay: Callable[[float], float]) -> Factor:
    if not 0 <= warmup < total:
        raise ConfigError(f"warmup ({warmup}) must be 0 or more and below total ({total})")

    def factor(count: int) -> float:
        if count < warmup:
            return count / warmup
        return decay(min(1.0, (count - warmup) / (total - warmup)))

    return factor


RULES: dict[str, Callable[[float], float]] = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}
SIZES: dict[str, Callable[[ODBStepInfo], int]] = {
    "samples": lambda info: info.block_samples,
    "tokens": lambda info: info.block_tokens,
    "weight": lambda info: info.block_weight,
}


class ScaledByBlock:
    """Learning rates that follow the size of each block: lr * (size / base), or the square root.

    base: the size for which the optimizer's learning rates are meant.
    rule: "linear" as for SGD, or "sqrt" as for Adam.
    of: what the size is: the "samples", "tokens" or "weight" (label tokens) of all ranks and steps
        of a block.

    The rates are scaled while `optimizer.step()` runs and are put back behind it, so any scheduler
    may set them in between and logs show its own; `factor` is the one in force. It hooks into the
    optimizer by torch's public step hooks; `remove` takes them out again. Raises ConfigError for
    settings that it does not know.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        base: float,
        rule: Literal["linear", "sqrt"] = "linear",
        of: Literal["samples", "tokens", "weight"] = "samples",
    ) -> None:
        if not base > 0:
            raise ConfigError(f"base must be positive, not {base}")
        if rule not in RULES or of not in SIZES:
            raise ConfigError(
                f"rule={rule!r}, of={of!r}: the rules are {', '.join(RULES)}, and a size is of "
                f"{', '.join(SIZES)}"
            )
        self.factor = 1.0
        self._base = base
        self._rule = RULES[rule]
        self._size = SIZES[of]
        self._kept: list[tuple[dict[str, Any], Any]] = []
        self._hooks = (
            optimizer.register_step_pre_hook(self._scale),
            optimizer.register_step_post_hook(self._put_back),
        )

    def update(self, info: ODBStepInfo) -> None:
        """Take the size of this step's block; before the optimizer's step."""
        self.factor = self._rule(self._size(info) / self._base)

    def remove(self) -> None:
        """Leave the optimizer alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def _scale(self, optimizer: Optimizer, *_: Any) -> None:
        self._put_back()  # a step that raised had no end
        for group in optimizer.param_groups:
            self._kept.append((group, group["lr"]))
            group["lr"] = group["lr"] * self.factor

    def _put_back(self, *_: Any) -> None:
        for group, rate in self._kept:
            group["lr"] = rate
        self._kept.clear()
