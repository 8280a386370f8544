"""Samples cross from worker processes in chunks: one flat tensor per field, not one per sample.

Handing a tensor to another process costs a file descriptor, a shared-memory file and a few system
calls, whatever its size. A chunk of 64 samples with three fields therefore travels as three
tensors, and is taken apart into views on arrival. What is not made of tensors, numpy arrays or
lists of numbers travels as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch


class Column(Protocol):
    """The values of one field of a chunk's samples."""

    def unpack(self) -> Sequence[Any]:
        """The values, equal to those that were packed in type, dtype, shape and content."""


@dataclass
class FlatColumn:
    """All the numbers of a field in one tensor, laid end to end."""

    flat: torch.Tensor


@dataclass
class TensorColumn(FlatColumn):
    """Tensors of one dtype."""

    shapes: list[torch.Size]

    def unpack(self) -> Sequence[Any]:
        pieces = torch.split(self.flat, [shape.numel() for shape in self.shapes])
        if all(len(shape) == 1 for shape in self.shapes):
            return list(pieces)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


@dataclass
class ArrayColumn(FlatColumn):
    """Numpy arrays of one dtype."""

    shapes: list[tuple[int, ...]]

    def unpack(self) -> Sequence[Any]:
        flat = self.flat.numpy()
        values, at = [], 0
        for shape in self.shapes:
            size = int(np.prod(shape))
            values.append(flat[at : at + size].reshape(shape))
            at += size
        return values


@dataclass
class NumbersColumn(FlatColumn):
    """Lists of ints or lists of floats."""

    lengths: list[int]

    def unpack(self) -> Sequence[Any]:
        flat = self.flat.tolist()
        values, at = [], 0
        for length in self.lengths:
            values.append(flat[at : at + length])
            at += length
        return values


@dataclass
class ObjectColumn:
    """Anything else, as it is."""

    values: list[Any]

    def unpack(self) -> Sequence[Any]:
        return self.values


@dataclass
class PackedSamples:
    """Samples by columns. `keys`: the fields of dict samples, in order; `fields`: how many fields
    tuple samples have; neither: every sample is the one column's value."""

    columns: list[Column] = field(default_factory=list)
    keys: list[Any] | None = None
    fields: int | None = None

    def unpack(self) -> Sequence[Any]:
        """The samples, equal to those that were packed."""
        values = [column.unpack() for column in self.columns]
        if self.keys is not None:
            keys = self.keys
            return [dict(zip(keys, row, strict=True)) for row in zip(*values, strict=True)]
        if self.fields is not None:
            return list(zip(*values, strict=True))
        return values[0]

    def own(self) -> PackedSamples:
        """The same samples in this process's own memory, so that shared memory and its file
        descriptors are free as soon as a chunk has arrived."""
        for column in self.columns:
            if isinstance(column, FlatColumn):
                column.flat = column.flat.clone()
        return self


def pack(samples: Sequence[Any]) -> PackedSamples:
    """Lay samples out by columns (at least one sample)."""
    first = samples[0]
    if type(first) is dict and first:
        keys = list(first)
        if all(type(s) is dict and list(s) == keys for s in samples):
            return PackedSamples([_column([s[key] for s in samples]) for key in keys], keys=keys)
    elif type(first) is tuple and first:
        fields = len(first)
        if all(type(s) is tuple and len(s) == fields for s in samples):
            columns = [_column([s[i] for s in samples]) for i in range(fields)]
            return PackedSamples(columns, fields=fields)
    return PackedSamples([_column(list(samples))])


def _column(values: list[Any]) -> Column:
    kind = type(values[0])
    column: Column | None = None
    if all(type(value) is kind for value in values):
        if kind is torch.Tensor:
            column = _tensors(values)
        elif kind is np.ndarray:
            column = _arrays(values)
        elif kind is list:
            column = _numbers(values)
    return column or ObjectColumn(values)


def _tensors(values: list[torch.Tensor]) -> Column | None:
    dtype = values[0].dtype
    for t in values:
        plain = t.layout is torch.strided and t.device.type == "cpu" and not t.requires_grad
        if t.dtype is not dtype or not plain or t.is_quantized:
            return None
    return TensorColumn(torch.cat([t.reshape(-1) for t in values]), [t.shape for t in values])


def _arrays(values: list[npt.NDArray[Any]]) -> Column | None:
    dtype = values[0].dtype
    if any(value.dtype != dtype for value in values):
        return None
    try:
        flat = torch.from_numpy(np.concatenate([value.ravel() for value in values]))
    except TypeError:  # a dtype that torch does not have: strings, objects, foreign byte order
        return None
    return ArrayColumn(flat, [value.shape for value in values])


def _numbers(values: list[list[Any]]) -> Column | None:
    kinds = set(map(type, chain.from_iterable(values)))
    if kinds <= {int}:
        dtype = torch.int64
    elif kinds == {float}:
        dtype = torch.float64
    else:
        return None
    try:
        flat = torch.tensor(list(chain.from_iterable(values)), dtype=dtype)
    except (OverflowError, RuntimeError):  # an int of more than 64 bits
        return None
    return NumbersColumn(flat, [len(value) for value in values])
