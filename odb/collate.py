"""The default collate function: pads the usual fields of language-model samples into a batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from odb.costs import IGNORED_LABEL
from odb.errors import ConfigError, CostError

USUAL_PADS: Mapping[str, int] = {
    "input_ids": 0,
    "attention_mask": 0,
    "labels": IGNORED_LABEL,
    "token_type_ids": 0,
    "position_ids": 0,
}
"""Pad values of the fields that language models usually take."""


@dataclass(frozen=True)
class PadCollate:
    """Makes a batch of dict samples, or of bare token sequences (these become `input_ids`).

    Fields of one dimension or more (tensors, arrays, lists of numbers) whose first sizes differ
    are padded and stacked to a tensor; equal ones are stacked; single numbers become a tensor;
    anything else becomes a list. If there is no `attention_mask` beside the `input_ids`, one is
    made (1 for tokens, 0 for padding).

    pad_values: for fields that are not in `USUAL_PADS`, or to override these (for example
        `{"input_ids": tokenizer.pad_token_id}`).
    padding_side: "right" or "left".
    pad_to_multiple_of: padded lengths are rounded up to this; the loader counts that in when it
        compares with the budget.

    Calling it raises CostError for a field of several lengths without a pad value.
    """

    pad_values: Mapping[str, float] = field(default_factory=dict)
    padding_side: Literal["right", "left"] = "right"
    pad_to_multiple_of: int = 1

    def __post_init__(self) -> None:
        if self.padding_side not in ("right", "left"):
            raise ConfigError(f'padding_side must be "right" or "left", not {self.padding_side!r}')
        if not isinstance(self.pad_to_multiple_of, int) or self.pad_to_multiple_of < 1:
            raise ConfigError(
                f"pad_to_multiple_of must be a whole number from 1, not {self.pad_to_multiple_of!r}"
            )

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Collate samples (at least one) that all have the same fields."""
        if not isinstance(samples[0], Mapping):
            if not _is_sequence(samples[0]):
                raise CostError(
                    f"cannot pad samples of type {type(samples[0]).__name__}: pass collate_fn=, a "
                    "function of a list of samples that makes a batch"
                )
            samples = [{"input_ids": sample} for sample in samples]
        _check_fields(samples)
        batch = {key: self._field(str(key), [s[key] for s in samples]) for key in samples[0]}
        if "input_ids" in batch and "attention_mask" not in batch:
            ones = [np.ones(len(s["input_ids"]), np.int64) for s in samples]
            batch["attention_mask"] = self._field("attention_mask", ones)
        return batch

    def _field(self, key: str, values: list[Any]) -> Any:
        pad = self.pad_values.get(key, USUAL_PADS.get(key))
        if pad is not None and isinstance(values[0], list | tuple):
            values = [_as_array(key, value) for value in values]  # also nested lists of numbers
        if not _is_sequence(values[0]):
            return _numbers(values) if all(map(_is_number, values)) else _stack(values)
        rows = _alike(values)
        _check_shapes(key, rows)
        lengths = [len(row) for row in rows]
        if pad is None:
            if min(lengths) != max(lengths):
                raise CostError(
                    f"the field {key!r} has several lengths and no pad value: pass "
                    f"collate_fn=PadCollate(pad_values={{{key!r}: ...}})"
                )
            return _stack([torch.as_tensor(row) for row in rows])
        length = -(-max(lengths) // self.pad_to_multiple_of) * self.pad_to_multiple_of
        out = torch.full((len(rows), length, *rows[0].shape[1:]), pad, dtype=_dtype(rows, pad))
        target: Any = out if isinstance(rows[0], torch.Tensor) else out.numpy()
        for i, (row, size) in enumerate(zip(rows, lengths, strict=True)):
            if self.padding_side == "right":
                target[i, :size] = row
            else:
                target[i, length - size :] = row
        return out


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number | np.bool_)


def _is_sequence(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim > 0
    return isinstance(value, list | tuple) and all(map(_is_number, value))


def _numbers(values: list[Any]) -> torch.Tensor:
    made_by_numpy = isinstance(values[0], np.generic)
    return torch.as_tensor(np.asarray(values)) if made_by_numpy else torch.tensor(values)


def _as_array(key: str, value: Any) -> Any:
    """A list as an array. An empty one has no dtype of its own, so it takes the narrowest."""
    if not isinstance(value, list | tuple):
        return value
    if not value:
        return np.zeros(0, np.bool_)
    try:
        return np.asarray(value)
    except ValueError as error:
        raise CostError(
            f"the field {key!r} holds lists of several lengths within a sample, which cannot be "
            "padded: pass collate_fn="
        ) from error


def _alike(values: list[Any]) -> list[Any]:
    """All rows as numpy arrays, which copy fastest, or as tensors where numpy lacks the dtype."""
    if all(isinstance(value, torch.Tensor) for value in values):
        if any(value.dtype is torch.bfloat16 for value in values):
            return values
        return [value.detach().numpy() for value in values]
    return [np.asarray(_as_array("", value)) for value in values]


def _dtype(rows: list[Any], pad: float) -> torch.dtype:
    """A dtype that holds every row and the pad value. Rows without elements have no say."""
    voting = [row for row in rows if row.shape[0]]
    dtypes = {
        row.dtype if isinstance(row, torch.Tensor) else torch.from_numpy(row[:0]).dtype
        for row in voting
    } or {torch.int64}
    dtype = functools.reduce(torch.promote_types, dtypes)
    if isinstance(pad, float) and not pad.is_integer() and not dtype.is_floating_point:
        return torch.float32
    return dtype


def _check_fields(samples: Sequence[Mapping[str, Any]]) -> None:
    fields = samples[0].keys()
    for sample in samples:
        if sample.keys() != fields:
            odd = ", ".join(sorted(repr(str(key)) for key in fields ^ sample.keys()))
            raise CostError(
                f"samples of one batch differ in the fields {odd}: give every sample all fields, "
                "or pass collate_fn="
            )


def _check_shapes(key: str, rows: list[Any]) -> None:
    if key == "input_ids" and rows[0].ndim != 1:
        raise CostError(
            f"input_ids has the shape {tuple(rows[0].shape)}, but a sample is one sequence: "
            "tokenize without return_tensors, or take the first row"
        )
    if len({tuple(row.shape[1:]) for row in rows}) > 1:
        raise CostError(
            f"the field {key!r} differs in more than its first size, which alone is padded: pass "
            "collate_fn="
        )


def _stack(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor) and len({value.shape for value in values}) == 1:
        return torch.stack(values)
    return values
