"""Tuples of any length, for the protocol's functions to run on.

A tuple of samples or of groups may hold a `Several` or `SeveralGroups`: one element that stands for
any number of elements (at least one), of which nothing matters but how many there are. Python does
the rest: such tuples are added, unpacked and iterated as always. Only what needs a number is done
here: their length, a slice at a symbolic place, a tuple times a symbolic number.

Each function takes plain integers as well and then gives plain tuples, so that the values that a
solver found are replayed on nothing but Python's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from model_check.symbolic import NeedsConcrete, SymInt
from spec.messages import Step
from spec.samples import Counts, Sample

_NUMBERS = count(1_000_000)
"""Names for the samples that only fill a plain tuple: no other sample is called like one."""


class Several:
    """So many samples of a tuple, one at least."""

    def __init__(self, size: Any) -> None:
        self.size = size
        self.cost = self.weight = size  # summed up; nothing that is proved here depends on it


class SeveralGroups:
    """So many groups of a tuple, one at least, with `samples` samples in all."""

    def __init__(self, size: Any, samples: Any) -> None:
        self.size = size
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(some_samples(self.samples))


class SeveralTotals:
    """The totals of so many steps, one at least."""

    def __init__(self, size: Any) -> None:
        self.size = size


STANDS_FOR_MANY = (Several, SeveralGroups, SeveralTotals)


class Steps(Step):
    """So many steps, one at least: a step whose group is `SeveralGroups`."""

    __slots__ = ()

    def _replace(self, **changes: Any) -> Steps:
        if changes.get("group") == ():
            changes["group"] = SeveralGroups(size_of(self), 0)  # each of them idle
        return Steps(*super()._replace(**changes))


class Row(tuple[Any, ...]):
    """A tuple that can be sliced at a symbolic place, if that is where an element begins."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        start, stop = index.start, index.stop
        if not isinstance(start, SymInt) and not isinstance(stop, SymInt):
            return Row(super().__getitem__(index))
        taken, place = [], _ZERO
        for element in self:
            after = place + size_of(element)
            inside = (start is None or place >= start) and (stop is None or after <= stop)
            outside = (start is not None and after <= start) or (stop is not None and place >= stop)
            if inside:
                taken.append(element)
            elif not outside:
                raise NeedsConcrete("a slice cuts through what stands for several elements")
            place = after
        return Row(taken)


class Size(SymInt):
    """A symbolic number that the tuple of one empty group can be multiplied by."""

    __slots__ = ()

    def __rmul__(self, other: object) -> Any:
        if other == ((),):
            return Row((SeveralGroups(self, 0),))
        return super().__rmul__(other)


_ZERO: Any = 0


def size_of(element: Any) -> Any:
    """How many elements an element of a tuple stands for. (A step with several groups is several
    steps.)"""
    if isinstance(element, Step):
        element = element.group
    return element.size if isinstance(element, STANDS_FOR_MANY) else 1


def length(values: Iterable[Any]) -> Any:
    """`len`, of tuples that may hold such elements, and of such elements."""
    if isinstance(values, SeveralGroups):
        return values.samples
    return sum((size_of(value) for value in values), _ZERO)


def some_samples(number: Any) -> tuple[Any, ...]:
    """So many samples."""
    if isinstance(number, SymInt):
        return (Several(number),) if number >= 1 else ()
    return tuple(Sample(next(_NUMBERS), 1, 1) for _ in range(number))


def some_groups(number: Any, samples: Any) -> tuple[Any, ...]:
    """So many groups with so many samples in all. None is empty if there are as many samples as
    groups; all are if there are no samples."""
    if isinstance(number, SymInt) or isinstance(samples, SymInt):
        return (SeveralGroups(number, samples),) if number >= 1 else ()
    if not number:
        return ()
    if not samples:
        return tuple(() for _ in range(number))
    return (*(some_samples(1) for _ in range(number - 1)), some_samples(samples - number + 1))


def totals_of(groups: Iterable[Any]) -> Row:
    """Totals for the steps that these groups become."""
    return Row(
        SeveralTotals(group.size) if isinstance(group, SeveralGroups) else Counts(1, 1, 1)
        for group in groups
    )
