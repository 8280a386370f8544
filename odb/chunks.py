"""Samples cross from worker processes in chunks: one flat tensor per dtype, not one per sample.

Handing a tensor to another process costs a connection, a file descriptor, a shared-memory file and
a few system calls, whatever its size, and it waits for a thread of a worker that is busy reading.
A chunk of 64 samples therefore travels as one buffer for each dtype, inside the message if it is
small, and is taken apart into views on arrival. What is not made of tensors, numpy arrays or lists
of numbers travels as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

INLINE_BYTES = 2 << 20
"""A buffer up to this size is copied through the pipe; a larger one goes by shared memory, which
has a high fixed cost. Measured: the pipe takes less CPU up to about 2 MB, the other above 4 MB."""


class Column(Protocol):
    """The values of one field of a chunk's samples."""

    def unpack(self, pieces: Sequence[torch.Tensor]) -> Sequence[Any]:
        """The values, equal to those that were packed in type, dtype, shape and content.

        pieces: the flat parts that the column laid down when it was packed.
        """


@dataclass
class TensorColumn:
    """Tensors of one dtype; `shapes` None: all have one dimension. One part for each."""

    shapes: list[torch.Size] | None

    def unpack(self, pieces: Sequence[torch.Tensor]) -> Sequence[Any]:
        if self.shapes is None:
            return pieces
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


@dataclass
class ArrayColumn:
    """Numpy arrays of one dtype. One part for all of them."""

    shapes: list[tuple[int, ...]]

    def unpack(self, pieces: Sequence[torch.Tensor]) -> Sequence[Any]:
        flat = pieces[0].numpy()
        values, at = [], 0
        for shape in self.shapes:
            size = math.prod(shape)
            values.append(flat[at : at + size].reshape(shape))
            at += size
        return values


@dataclass
class NumbersColumn:
    """Lists of ints or lists of floats. One part for all of them."""

    lengths: list[int]

    def unpack(self, pieces: Sequence[torch.Tensor]) -> Sequence[Any]:
        flat = pieces[0].tolist()
        values, at = [], 0
        for length in self.lengths:
            values.append(flat[at : at + length])
            at += length
        return values


@dataclass
class ObjectColumn:
    """Anything else, as it is. No parts."""

    values: list[Any]

    def unpack(self, pieces: Sequence[torch.Tensor]) -> Sequence[Any]:
        return self.values


class Laid(NamedTuple):
    """A column and the flat parts, all of one dtype, that its values are made of."""

    column: Column
    parts: list[torch.Tensor]


@dataclass
class Buffer:
    """Flat parts of one dtype, laid end to end."""

    flat: torch.Tensor
    sizes: list[int]

    def __getstate__(self) -> tuple[Any, torch.dtype, list[int]]:
        """What crosses to another process. A tensor would go by shared memory."""
        flat = self.flat
        if 0 < flat.nbytes <= INLINE_BYTES:
            return flat.view(torch.uint8).numpy(), flat.dtype, self.sizes
        return flat, flat.dtype, self.sizes

    def __setstate__(self, state: tuple[Any, torch.dtype, list[int]]) -> None:
        content, dtype, self.sizes = state
        if isinstance(content, np.ndarray):
            content = torch.from_numpy(content).view(dtype)
        self.flat = content


@dataclass
class PackedSamples:
    """Samples by columns. `places`: for each column, its buffer and its first and last part there.
    `keys`: the fields of dict samples, in order; `fields`: how many fields tuple samples have;
    neither: every sample is the one column's value."""

    columns: list[Column]
    buffers: list[Buffer]
    places: list[tuple[int, int, int]]
    keys: list[Any] | None = None
    fields: int | None = None

    def unpack(self) -> Sequence[Any]:
        """The samples, equal to those that were packed."""
        pieces = [torch.split(buffer.flat, buffer.sizes) for buffer in self.buffers]
        values = [
            column.unpack(pieces[buffer][first:last] if last > first else ())
            for column, (buffer, first, last) in zip(self.columns, self.places, strict=True)
        ]
        if self.keys is not None:
            keys = self.keys
            return [dict(zip(keys, row, strict=True)) for row in zip(*values, strict=True)]
        if self.fields is not None:
            return list(zip(*values, strict=True))
        return values[0]

    def own(self) -> PackedSamples:
        """The same samples in this process's own memory, so that shared memory and its file
        descriptors are free as soon as a chunk has arrived."""
        for buffer in self.buffers:
            if buffer.flat.is_shared():  # type: ignore[no-untyped-call]
                buffer.flat = buffer.flat.clone()
        return self


def pack(samples: Sequence[Any]) -> PackedSamples:
    """Lay samples out by columns (at least one sample)."""
    first = samples[0]
    if type(first) is dict and first:
        keys = list(first)
        if all(type(s) is dict and list(s) == keys for s in samples):
            packed = _lay([_column([s[key] for s in samples]) for key in keys])
            packed.keys = keys
            return packed
    elif type(first) is tuple and first:
        fields = len(first)
        if all(type(s) is tuple and len(s) == fields for s in samples):
            packed = _lay([_column([s[i] for s in samples]) for i in range(fields)])
            packed.fields = fields
            return packed
    return _lay([_column(list(samples))])


def _lay(laid: list[Laid]) -> PackedSamples:
    """Put the parts of all columns that have one dtype into one buffer."""
    parts: dict[torch.dtype, list[torch.Tensor]] = {}
    places: list[tuple[int, int, int]] = []
    for _, own in laid:
        if not own:
            places.append((0, 0, 0))
            continue
        together = parts.setdefault(own[0].dtype, [])
        places.append((list(parts).index(own[0].dtype), len(together), len(together) + len(own)))
        together.extend(own)
    buffers = [Buffer(torch.cat(ps), [p.numel() for p in ps]) for ps in parts.values()]
    return PackedSamples([column for column, _ in laid], buffers, places)


def _column(values: list[Any]) -> Laid:
    kind = type(values[0])
    laid: Laid | None = None
    if all(type(value) is kind for value in values):
        if kind is torch.Tensor:
            laid = _tensors(values)
        elif kind is np.ndarray:
            laid = _arrays(values)
        elif kind is list:
            laid = _numbers(values)
    return laid or Laid(ObjectColumn(values), [])


def _tensors(values: list[torch.Tensor]) -> Laid | None:
    dtype = values[0].dtype
    flat = True
    for t in values:
        plain = t.layout is torch.strided and t.device.type == "cpu" and not t.requires_grad
        if t.dtype is not dtype or not plain or t.is_quantized:
            return None
        flat = flat and t.ndim == 1
    if flat:
        return Laid(TensorColumn(None), values)
    return Laid(TensorColumn([t.shape for t in values]), [t.reshape(-1) for t in values])


def _arrays(values: list[npt.NDArray[Any]]) -> Laid | None:
    dtype = values[0].dtype
    if any(value.dtype != dtype for value in values):
        return None
    try:
        flat = torch.from_numpy(np.concatenate([value.ravel() for value in values]))
    except TypeError:  # a dtype that torch does not have: strings, objects, foreign byte order
        return None
    return Laid(ArrayColumn([value.shape for value in values]), [flat])


def _numbers(values: list[list[Any]]) -> Laid | None:
    kinds = set(map(type, chain.from_iterable(values)))
    if kinds <= {int}:
        dtype = torch.int64
    elif kinds == {float}:
        dtype = torch.float64
    else:
        return None
    try:
        flat = torch.tensor(list(chain.from_iterable(values)), dtype=dtype)
    except (OverflowError, RuntimeError, ValueError):  # an int of more than 64 bits
        return None
    return Laid(NumbersColumn([len(value) for value in values]), [flat])
