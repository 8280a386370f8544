"""Alignment to any target in the envelope succeeds, and loses nothing: the arithmetic of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model_check.prover import Obligation, Source, both
from proofs.theorem import Theorem
from spec import alignment


@dataclass(frozen=True)
class Splitting:
    """The function that this theorem is about."""

    half: Callable[[int], int] = alignment.half


SHIPPED = Splitting()


def _two_parts(source: Source, f: Splitting) -> Callable[[], Any]:
    size = source.int("size")
    source.assume(size >= 2)
    return lambda: both(f.half(size) >= 1, size - f.half(size) >= 1)


def _something_to_split(source: Source, f: Splitting) -> Callable[[], Any]:
    """`largest` is the size of the group that the heap gives: no group is larger."""
    groups, held, target = source.int("groups"), source.int("held"), source.int("target")
    largest = source.int("largest")
    source.assume(both(groups >= 1, groups < target, target <= held))
    source.assume(both(largest >= 1, held <= groups * largest))
    return lambda: both(f.half(largest) >= 1, largest - f.half(largest) >= 1)


def _shrinks(source: Source, f: Splitting) -> Callable[[], Any]:
    """What is still missing is a ranking function of the loop."""
    groups, target, size = source.int("groups"), source.int("target"), source.int("size")
    source.assume(both(groups >= 1, groups < target, size >= 2))

    def claim() -> Any:
        parts = 2 if f.half(size) < size else 1
        missing, left = target - groups, target - (groups - 1 + parts)
        return both(left < missing, left >= 0)

    return claim


THEOREM = Theorem(
    promise="alignment-succeeds",
    states=(
        "For every T in the envelope, a rank with any number of samples in groups of any sizes "
        "ends up with exactly T non-empty groups."
    ),
    assumes=(
        "1 <= T <= samples held. `split` takes the largest group each time (it is a heap ordered "
        "by size) and puts back its two slices at `half(size)`."
    ),
    reasoning=(
        "While there are fewer groups than T, the largest has two samples or more, because "
        "otherwise there would be fewer samples than T. It is split into two non-empty parts, so "
        "that there is one group more and no group is empty. What is missing shrinks by one each "
        "time and never below 0, so the loop ends at exactly T. With more groups than T, whole "
        "groups are carried: those kept are T, and none is empty."
    ),
    leaves_out=(
        "That Python's heapq and slices do what they say; that the same samples come out is the "
        "theorem `partition`."
    ),
    obligations=(
        Obligation(
            "two parts",
            "a group of two samples or more has two non-empty parts",
            _two_parts,
            SHIPPED,
            {"rounded up twice": Splitting(half=lambda size: (size + 2) // 2)},
        ),
        Obligation(
            "something to split",
            "while there are fewer groups than T, the largest can be split",
            _something_to_split,
            SHIPPED,
            {"a group of two stays whole": Splitting(half=lambda size: (size + 2) // 2)},
        ),
        Obligation(
            "the loop ends",
            "each split brings the number of groups nearer to T, and never beyond it",
            _shrinks,
            SHIPPED,
            {"nothing is split off": Splitting(half=lambda size: size)},
        ),
    ),
)
