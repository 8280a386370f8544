"""Makes a rank's groups exactly T: splits when it has too few, carries when it has too many.

For every T in the safe envelope, `1 <= T <= samples held`, this succeeds, and no sample is lost or
doubled. Both moves keep the budget: part of a group is never heavier than the group.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from spec.errors import EnvelopeError
from spec.grouping import by_length
from spec.samples import Group, in_arrival_order


class Alignment(NamedTuple):
    """`groups`: one for each step of the round, longest first. `carried`: what stays for the next
    round, oldest first."""

    groups: tuple[Group, ...]
    carried: Group


def align(groups: tuple[Group, ...], target: int) -> Alignment:
    """Turn the groups of one rank that holds samples into exactly `target` groups.

    Raises EnvelopeError if no such alignment exists.
    """
    held = sum(len(group) for group in groups)
    if not 1 <= target <= held:
        raise EnvelopeError(f"cannot align {held} samples to {target} steps")
    if len(groups) > target:
        return carry(groups, target)
    return Alignment(split(groups, target), ())


def carry(groups: tuple[Group, ...], target: int) -> Alignment:
    """Keep the `target` groups that hold the oldest samples; the others' samples wait.

    The oldest sample of a window therefore always leaves in the next round, which is what bounds
    every sample's delay (promise: bounded-delay).
    """
    by_age = sorted(range(len(groups)), key=lambda i: min(s.seq for s in groups[i]))
    kept = set(by_age[:target])
    return Alignment(
        tuple(group for i, group in enumerate(groups) if i in kept),
        in_arrival_order(group for i, group in enumerate(groups) if i not in kept),
    )


def split(groups: tuple[Group, ...], target: int) -> tuple[Group, ...]:
    """Halve the group with the most samples (of several, the longest) until there are `target`."""
    queue = [(-len(group), by_length(group[0]), group) for group in groups]
    heapq.heapify(queue)
    while len(queue) < target:
        _, _, group = heapq.heappop(queue)
        middle = half(len(group))
        for part in (group[:middle], group[middle:]):
            heapq.heappush(queue, (-len(part), by_length(part[0]), part))
    return tuple(sorted((group for _, _, group in queue), key=lambda group: by_length(group[0])))


def half(size: int) -> int:
    """Where a group of two samples or more is split: neither part is empty."""
    return (size + 1) // 2
