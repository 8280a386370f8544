"""The draw that all ranks share: a permutation that depends on nothing but its key.

Written out here, not taken from a library, so that every rank, Python version and machine draws
the same. The generator is SplitMix64 (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

from spec.samples import Group

_WORD = 2**64 - 1


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def arrange(groups: tuple[Group, ...], key: tuple[int, ...]) -> tuple[Group, ...]:
    """The groups of a round in the order of its steps."""
    return tuple(groups[i] for i in permutation(len(groups), *key))


def permutation(size: int, *key: int) -> tuple[int, ...]:
    """A permutation of `range(size)`, drawn from `key` (seed, epoch, round) by Fisher and Yates."""
    state = 0
    for part in key:
        state = _mix((state ^ part) + 0x9E3779B97F4A7C15 & _WORD)
    order = list(range(size))
    for last in range(size - 1, 0, -1):
        state = (state + 0x9E3779B97F4A7C15) & _WORD
        other = _mix(state) % (last + 1)
        order[last], order[other] = order[other], order[last]
    return tuple(order)
