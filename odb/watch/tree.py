"""Who is connected to whom: a tree over the ranks in which no rank holds many connections."""

from __future__ import annotations

FAN_OUT = 64
"""Children of a rank: up to 65 ranks all are the root's, and 4,161 ranks are two steps from it."""


def parent(rank: int, fan_out: int = FAN_OUT) -> int | None:
    """The rank that this one connects to; None for the root, rank 0."""
    return None if rank == 0 else (rank - 1) // fan_out


def children(rank: int, world_size: int, fan_out: int = FAN_OUT) -> range:
    """The ranks that connect to this one."""
    first = fan_out * rank + 1
    return range(min(first, world_size), min(first + fan_out, world_size))


def ancestors(rank: int, fan_out: int = FAN_OUT) -> list[int]:
    """The ranks between this one and the root, nearest first, the root included."""
    found = []
    above = parent(rank, fan_out)
    while above is not None:
        found.append(above)
        above = parent(above, fan_out)
    return found
