"""What members of a data-parallel coordinate compare before each step: numbers, and who failed.

Each member passes a `Header`; the element-wise maximum over all of them is what `judge` reads. A
number is passed with its negative, so that the maximum shows the largest and the smallest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from odb.errors import IntegrationError, MismatchError
from odb.info import ODBStepInfo

NO_VALUE = -(2**62)
"""Passed for a number that a member does not have: it leaves the maximum to the others."""


class Header(NamedTuple):
    """What a member says before a step.

    failed: 0, or its place among the members plus 1 if it cannot go on. ended: whether the epoch
    is over, as a number. digest: of what it has read. Both None if it does not read.
    """

    epoch: int
    step: int
    failed: int = 0
    ended: int | None = None
    digest: int | None = None

    def encode(self) -> tuple[int, ...]:
        """The numbers whose maximum is taken."""
        pairs = (_pair(value) for value in (self.epoch, self.step, self.ended, self.digest))
        return (self.failed, *(number for pair in pairs for number in pair))


def judge(maximum: Sequence[int]) -> int | None:
    """The member that failed, if one did, by its place among the members.

    Raises MismatchError if members are at different places, IntegrationError if they have read
    different things. Both are the same on every member.
    """
    failed, *numbers = maximum
    spans = zip(numbers[::2], numbers[1::2], strict=True)
    (epoch, step, ended, digest) = ((-negated, high) for high, negated in spans)
    for term, (low, high) in (("epoch", epoch), ("step", step)):
        if low != high:
            raise MismatchError(term=term, low=low, high=high)
    if failed:
        return failed - 1
    if _differs(ended) or _differs(digest):
        what = "the epoch ended for some only" if _differs(ended) else "their batches differ"
        raise IntegrationError(
            f"the members of a data-parallel coordinate have not read the same in step {step[0]} "
            f"of epoch {epoch[0]}: {what}. With Layout.checked the dataset and the collate "
            "function must give the same on every member, so seed what they draw by sample and "
            "epoch, and build the loader with the same arguments. Layout.loader reads once instead"
        )
    return None


def _pair(value: int | None) -> tuple[int, int]:
    return (NO_VALUE, NO_VALUE) if value is None else (value, -value)


def _differs(span: tuple[int, int]) -> bool:
    low, high = span
    return high != NO_VALUE and low != high


def digest_of(batch: Any, info: ODBStepInfo) -> int:
    """A number for what is in a batch and its info; it fits into 61 bits.

    Tensors, arrays, numbers and texts count, in mappings and sequences; other things do not, as
    they have no content that is sure to be the same in another process.
    """
    hashed = hashlib.sha256(repr(info).encode())
    for part in _parts(batch):
        hashed.update(part)
    return int.from_bytes(hashed.digest()[:8], "big") >> 3


def _parts(value: Any) -> list[bytes]:
    match value:
        case torch.Tensor():
            flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            return [f"{tuple(value.shape)} {value.dtype}".encode(), flat.numpy().tobytes()]
        case np.ndarray():
            return [f"{value.shape} {value.dtype}".encode(), np.ascontiguousarray(value).tobytes()]
        case str() | bytes() | bool() | int() | float() | None:
            return [repr(value).encode()]
        case Mapping():
            return [p for key, item in value.items() for p in (repr(key).encode(), *_parts(item))]
        case list() | tuple():
            return [part for item in value for part in _parts(item)]
    return []
