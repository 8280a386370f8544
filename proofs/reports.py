"""Symbolic reports and tallies, and what may be assumed of them.

The key to every number of ranks: the tally of any reports is characterised by two facts about each
of its fields. It bounds the value of every rank, and it is the value of some rank. The theorems
assume these two facts of an arbitrary tally, and `proofs.exchange` proves them by induction over
`merge`.
"""

from __future__ import annotations

from typing import Any

from model_check.prover import Source, both, either, negation
from spec.config import Terms
from spec.exchange import Report, Tally

SCALARS = Tally._fields[2:]
MAXIMA = ("want", "any_drained", "spare_missing", "any_waiting")
MINIMA = ("limit", "spare_from", "failed_rank", "closed_rank")


def some_terms(source: Source, name: str) -> Terms:
    """Terms of any values."""
    return Terms(*(source.int(f"{name}.{field}") for field in Terms._fields))


def some_tally(source: Source, name: str) -> Tally:
    """A tally of any values."""
    return Tally(
        some_terms(source, f"{name}.low"),
        some_terms(source, f"{name}.high"),
        *(source.int(f"{name}.{field}") for field in SCALARS),
    )


def flat(tally: Tally) -> tuple[Any, ...]:
    """All numbers of a tally."""
    return (*tally.low, *tally.high, *tally[2:])


def equal(a: Tally, b: Tally) -> Any:
    """Whether two tallies are the same."""
    return both(*(x == y for x, y in zip(flat(a), flat(b), strict=True)))


def bounds(tally: Tally, part: Tally) -> Any:
    """The first fact: the tally bounds each value of a tally that went into it."""
    return both(
        *(low <= value for low, value in zip(tally.low, part.low, strict=True)),
        *(high >= value for high, value in zip(tally.high, part.high, strict=True)),
        *(getattr(tally, name) >= getattr(part, name) for name in MAXIMA),
        *(getattr(tally, name) <= getattr(part, name) for name in MINIMA),
    )


def attained(tally: Tally, a: Tally, b: Tally) -> Any:
    """The second fact, one step: each value of the tally is that of one of two others."""
    return both(
        *(
            either(value == x, value == y)
            for value, x, y in zip(flat(tally), flat(a), flat(b), strict=True)
        )
    )


def some_report(source: Source, name: str, window: Any) -> Report:
    """A report that a sound rank may post: as many groups as samples at most, and a drained rank
    gives the window as its limit. (`spec.rank` posts no other; tests of `proofs` check that.)"""
    want, limit = source.int(f"{name}.want"), source.int(f"{name}.limit")
    has_spare, waiting = source.int(f"{name}.has_spare"), source.int(f"{name}.waiting")
    for flag in (has_spare, waiting):
        source.assume(both(flag >= 0, flag <= 1))
    source.assume(both(want >= 0, limit >= 1, limit <= window))
    source.assume(either(both(want == 0, limit == window), both(want >= 1, want <= limit)))
    terms = some_terms(source, name)
    flags = {"has_spare": has_spare == 1, "waiting": waiting == 1}
    return Report(terms, want, limit, **flags, failed=False, closed=False)


def some_report_of_any_kind(source: Source, name: str, window: Any) -> Report:
    """A report of a rank that may have failed, or whose trainer may have stopped."""
    report = some_report(source, name, window)
    failed, closed = source.int(f"{name}.failed"), source.int(f"{name}.closed")
    for flag in (failed, closed):
        source.assume(both(flag >= 0, flag <= 1))
    return report._replace(failed=failed == 1, closed=closed == 1)


def lifted(report: Report, rank: Any, world_size: Any) -> Tally:
    """`exchange.tally_of`, written without branches, as it is part of an assumption here.
    (`tests/test_proofs.py` compares the two.)"""
    drained: Any = report.want == 0
    has_spare: Any = report.has_spare
    lacks_one = negation(has_spare)
    return Tally(
        low=report.terms,
        high=report.terms,
        want=report.want,
        limit=report.limit,
        any_drained=_choose(drained, 1, 0),
        spare_missing=_choose(both(drained, lacks_one), 1, 0),
        spare_from=_choose(has_spare, rank, world_size),
        any_waiting=_choose(report.waiting, 1, 0),
        failed_rank=_choose(report.failed, rank, world_size),
        closed_rank=_choose(report.closed, rank, world_size),
    )


def _choose(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, bool):
        return yes if condition else no
    return condition.choose(yes, no)
