"""The exchange: the tally does not depend on how reports are combined, and what it says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from model_check.prover import Obligation, Source, both
from proofs.reports import attained, bounds, equal, some_tally
from proofs.theorem import Theorem
from spec import exchange
from spec.exchange import Tally


@dataclass(frozen=True)
class Exchange:
    """The functions that these theorems are about."""

    merge: Callable[[Tally, Tally], Tally] = exchange.merge
    encode: Callable[[Tally], tuple[int, ...]] = exchange.encode
    decode: Callable[[tuple[int, ...]], Tally] = exchange.decode


SHIPPED = Exchange()


def _associative(source: Source, f: Exchange) -> Callable[[], Any]:
    a, b, c = (some_tally(source, name) for name in "abc")
    return lambda: equal(f.merge(a, f.merge(b, c)), f.merge(f.merge(a, b), c))


def _commutative(source: Source, f: Exchange) -> Callable[[], Any]:
    a, b = some_tally(source, "a"), some_tally(source, "b")
    return lambda: equal(f.merge(a, b), f.merge(b, a))


def _idempotent(source: Source, f: Exchange) -> Callable[[], Any]:
    a = some_tally(source, "a")
    return lambda: equal(f.merge(a, a), a)


def _keeps_bounds(source: Source, f: Exchange) -> Callable[[], Any]:
    a, b, x, y = (some_tally(source, name) for name in "abxy")
    source.assume(bounds(a, x))
    source.assume(bounds(b, y))
    return lambda: both(bounds(f.merge(a, b), x), bounds(f.merge(a, b), y))


def _keeps_values(source: Source, f: Exchange) -> Callable[[], Any]:
    a, b = some_tally(source, "a"), some_tally(source, "b")
    return lambda: attained(f.merge(a, b), a, b)


def _on_the_wire(source: Source, f: Exchange) -> Callable[[], Any]:
    a, b = some_tally(source, "a"), some_tally(source, "b")

    def claim() -> Any:
        pairs = zip(f.encode(a), f.encode(b), strict=True)
        received = f.decode(tuple(max(x, y) for x, y in pairs))
        return equal(received, f.merge(a, b))

    return claim


def _survives_the_wire(source: Source, f: Exchange) -> Callable[[], Any]:
    a = some_tally(source, "a")
    return lambda: equal(f.decode(f.encode(a)), a)


def _first_wins(a: Tally, b: Tally) -> Tally:
    return exchange.merge(a, b)._replace(want=a.want)


def _limit_adds_up(a: Tally, b: Tally) -> Tally:
    return exchange.merge(a, b)._replace(limit=a.limit + b.limit)


def _minimum_want(a: Tally, b: Tally) -> Tally:
    return exchange.merge(a, b)._replace(want=min(a.want, b.want))


def _one_more(a: Tally, b: Tally) -> Tally:
    return exchange.merge(a, b)._replace(want=max(a.want, b.want) + 1)


def _subtracting(a: Tally, b: Tally) -> Tally:
    return exchange.merge(a, b)._replace(want=a.want - b.want)


def _limit_not_negated(tally: Tally) -> tuple[int, ...]:
    vector = list(exchange.encode(tally))
    vector[-6] = tally.limit
    return tuple(vector)


def _changed(**functions: Any) -> Exchange:
    return replace(SHIPPED, **functions)


THEOREM = Theorem(
    promise="exchange",
    states=(
        "The tally of a round depends on the reports alone, not on how many ranks there are or in "
        "which order and grouping their reports are combined. Every field of it bounds every "
        "rank's value and is some rank's value."
    ),
    assumes="Reports are integers (no other bound).",
    reasoning=(
        "merge is associative, commutative and idempotent. The two facts hold of a single report "
        "and, by the two induction steps, of the merge of any tallies that they hold of; so they "
        "hold for any number of ranks. An element-wise maximum of encoded tallies decodes to their "
        "merge, which is what all_reduce(MAX) computes."
    ),
    leaves_out="That all_reduce computes a maximum, and 64-bit overflow (see `WIRE_LIMIT`).",
    obligations=(
        Obligation(
            "merge is associative",
            "merge(a, merge(b, c)) = merge(merge(a, b), c)",
            _associative,
            SHIPPED,
            {"wants are subtracted": _changed(merge=_subtracting)},
        ),
        Obligation(
            "merge is commutative",
            "merge(a, b) = merge(b, a)",
            _commutative,
            SHIPPED,
            {"the first want wins": _changed(merge=_first_wins)},
        ),
        Obligation(
            "merge is idempotent",
            "merge(a, a) = a",
            _idempotent,
            SHIPPED,
            {"limits add up": _changed(merge=_limit_adds_up)},
        ),
        Obligation(
            "bounds, induction step",
            "what bounds the reports behind a and behind b bounds those behind merge(a, b)",
            _keeps_bounds,
            SHIPPED,
            {"the smaller want counts": _changed(merge=_minimum_want)},
        ),
        Obligation(
            "values, induction step",
            "each field of merge(a, b) is that field of a or of b",
            _keeps_values,
            SHIPPED,
            {"one more than the larger want": _changed(merge=_one_more)},
        ),
        Obligation(
            "maximum on the wire",
            "the element-wise maximum of two encoded tallies decodes to their merge",
            _on_the_wire,
            SHIPPED,
            {"the limit is not negated": _changed(encode=_limit_not_negated)},
        ),
        Obligation(
            "wire",
            "a tally that is encoded and decoded is the same",
            _survives_the_wire,
            SHIPPED,
            {"the limit is not negated": _changed(encode=_limit_not_negated)},
        ),
    ),
)
