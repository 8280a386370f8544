"""Which paths of a function have still to be told apart by a solver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

import z3

from model_check.paths import Path


def not_apart(paths: Sequence[Path], depth: int = 0) -> Iterator[tuple[Path, Path]]:
    """The pairs of paths that do not part at a condition that one has and the other negates. As a
    rule there are none; the solver is asked about the rest."""
    if len(paths) < 2:
        return
    families: list[list[Path]] = []
    for path in paths:
        for family in families:
            if _same_at(depth, path, family[0]):
                family.append(path)
                break
        else:
            families.append([path])
    for a, b in combinations(families, 2):
        if not _complementary(depth, a[0], b[0]):
            yield from product(a, b)
    for family in families:
        if len(family[0].condition) > depth:
            yield from not_apart(family, depth + 1)
        else:
            yield from combinations(family, 2)


def _same_at(depth: int, a: Path, b: Path) -> bool:
    ends = [len(path.condition) <= depth for path in (a, b)]
    return all(ends) or (not any(ends) and a.condition[depth].eq(b.condition[depth]))


def _complementary(depth: int, a: Path, b: Path) -> bool:
    if min(len(a.condition), len(b.condition)) <= depth:
        return False
    here, there = a.condition[depth], b.condition[depth]
    return bool(z3.Not(here).eq(there) or z3.Not(there).eq(here))
