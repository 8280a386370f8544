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
    """So many samples of a tuple (perhaps none, if `any_samples` says so)."""

    def __init__(self, size: Any) -> None:
        self.size = size
        self.cost = self.weight = size  # summed up; nothing that is proved here depends on it


class SeveralGroups:
    """So many groups of a tuple, one at least, with `samples` samples in all."""

    def __init__(self, size: Any, samples: Any) -> None:
        self.size = size
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(any_samples(self.samples))

    def __bool__(self) -> bool:
        """Whether they hold samples: all of them do, or none."""
        return bool(self.samples >= 1)


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
    """A tuple in which elements may stand for many. A slice counts what they stand for: it may
    begin and end where an element does. An element by its number is one by itself, or the first."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            if index != 0 and any(map(stands_for_many, self)):
                raise NeedsConcrete("which element that is, depends on how many others stand for")
            return super().__getitem__(index)
        if index.step is not None or _negative(index.start) or _negative(index.stop):
            if any(map(stands_for_many, self)):
                raise NeedsConcrete("only slices from one place to another are symbolic")
            return Row(super().__getitem__(index))
        start, stop = index.start, index.stop
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

    def __add__(self, other: Any) -> Any:
        return Row((*self, *other))


def _negative(place: Any) -> bool:
    return isinstance(place, int) and place < 0


class Size(SymInt):
    """A symbolic number that the tuple of one empty group can be multiplied by."""

    __slots__ = ()

    def __rmul__(self, other: object) -> Any:
        if other == ((),):
            return Row((SeveralGroups(self, 0),))
        return super().__rmul__(other)


_ZERO: Any = 0


def stands_for_many(element: Any) -> bool:
    """Whether an element of a tuple may stand for several."""
    if isinstance(element, Step):
        element = element.group
    return isinstance(element, STANDS_FOR_MANY)


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
        return Row((Several(number),) if number >= 1 else ())
    return tuple(Sample(next(_NUMBERS), 1, 1) for _ in range(number))


def any_samples(number: Any) -> tuple[Any, ...]:
    """So many samples, perhaps none, for tuples of which only the length is looked at: no path
    needs to ask whether there are any."""
    return Row((Several(number),)) if isinstance(number, SymInt) else some_samples(number)


def some_groups(number: Any, samples: Any) -> tuple[Any, ...]:
    """So many groups with so many samples in all. None is empty if there are as many samples as
    groups; all are if there are no samples."""
    if isinstance(number, SymInt) or isinstance(samples, SymInt):
        return Row((SeveralGroups(number, samples),) if number >= 1 else ())
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
