"""Measures samples: tokens for the budget, label tokens for the loss, further resources.

Runs in the DataLoader's workers, next to the dataset, so that it costs the trainer nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch

from odb.errors import CostError

IGNORED_LABEL = -100
"""The label that PyTorch's cross entropy leaves out of its mean."""

CostFn = Callable[[Any], int]


class Measured(NamedTuple):
    """Cost in tokens, loss weight, and one further cost for each resource."""

    cost: int
    weight: int
    extras: tuple[int, ...]


@dataclass(frozen=True)
class Resource:
    """A further budget, such as image patches: `cost_fn(sample)` summed over a batch stays within
    `budget` (unless one sample alone exceeds it)."""

    cost_fn: CostFn
    budget: int


@dataclass(frozen=True)
class CostModel:
    """How samples are measured. `weight_fn` None means that every sample weighs 1."""

    cost_fn: CostFn
    weight_fn: CostFn | None
    extra_fns: tuple[tuple[str, CostFn], ...] = ()

    @classmethod
    def of(
        cls,
        cost_fn: CostFn | None = None,
        loss_weight_fn: CostFn | None = None,
        extra_fns: tuple[tuple[str, CostFn], ...] = (),
    ) -> CostModel:
        """The model for a user's functions, with the defaults for those that are None. Beside a
        cost function of the user's, the default weight is the labels', or else that cost."""
        if loss_weight_fn is None:
            loss_weight_fn = default_loss_weight if cost_fn is None else LabelsOrCost(cost_fn)
        return cls(cost_fn or default_cost, loss_weight_fn, extra_fns)

    def measure(self, sample: Any) -> Measured:
        """Measure one sample; None costs nothing. Raises CostError for what is no whole number."""
        if sample is None:
            return Measured(0, 0, (0,) * len(self.extra_fns))
        cost = _whole("cost_fn", self.cost_fn(sample))
        if cost == 0:
            return Measured(0, 0, (0,) * len(self.extra_fns))
        weight = 1 if self.weight_fn is None else _whole("loss_weight_fn", self.weight_fn(sample))
        extras = tuple(_whole(f"resource {name!r}", fn(sample)) for name, fn in self.extra_fns)
        return Measured(cost, weight, extras)


def default_cost(sample: Any) -> int:
    """The length of `sample["input_ids"]`, or of the sample if it is a sequence of numbers.

    Raises CostError for anything else.
    """
    if isinstance(sample, Mapping):
        if "input_ids" not in sample:
            raise CostError(
                f"a sample with the keys {sorted(map(str, sample))} has no input_ids: pass "
                "cost_fn=, a function of a sample that returns its number of tokens"
            )
        return _length(sample["input_ids"])
    return _length(sample)


def default_loss_weight(sample: Any) -> int:
    """How many label positions the mean loss of a causal language model averages over.

    That is the number of labels that are not -100, without the first one, which the causal shift
    drops; all tokens if there are no labels; 1 if the label is a single number.
    """
    labels = _labels(sample)
    if labels is None:
        return default_cost(sample)
    if isinstance(labels, torch.Tensor):
        if labels.dtype is torch.int64 and labels.device.type == "cpu" and labels.ndim == 1:
            labels = labels.numpy()  # counts a few microseconds faster per sample
        else:
            return 1 if labels.ndim == 0 else int((labels.reshape(-1)[1:] != IGNORED_LABEL).sum())
    if isinstance(labels, np.ndarray):
        return (
            1
            if labels.ndim == 0
            else int(np.count_nonzero(labels.reshape(-1)[1:] != IGNORED_LABEL))
        )
    if isinstance(labels, list | tuple):
        shifted = labels[1:]
        return len(shifted) - shifted.count(IGNORED_LABEL)
    return 1


@dataclass(frozen=True)
class LabelsOrCost:
    """The loss weight of a sample's labels, or its cost if it has none."""

    cost_fn: CostFn

    def __call__(self, sample: Any) -> int:
        return self.cost_fn(sample) if _labels(sample) is None else default_loss_weight(sample)


def _labels(sample: Any) -> Any:
    """A sample's labels, also under the names that Hugging Face's collators rename to `labels`."""
    if isinstance(sample, Mapping):
        for name in ("labels", "label", "label_ids"):
            if sample.get(name) is not None:
                return sample[name]
    return None


def _length(values: Any) -> int:
    if isinstance(values, torch.Tensor):
        if values.ndim > 0:
            return values.numel()
    elif isinstance(values, np.ndarray):
        if values.ndim > 0:
            return int(values.size)
    elif isinstance(values, list | tuple) and all(
        isinstance(v, int | float | np.number) for v in values
    ):
        return len(values)
    raise CostError(
        f"cannot tell how many tokens a {type(values).__name__} has: pass cost_fn=, a function "
        "of a sample that returns its number of tokens"
    )


def _whole(who: str, value: Any) -> int:
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()  # a float stays one, and is refused
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise CostError(f"{who} returned {value!r}; it must return a whole number of 0 or more")
    return int(value)
