"""The exchange: tallies merge in any order, survive the wire, and lead to one decision."""

from __future__ import annotations

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.config import Budget, Config, Idle, Mode, Place, Terms, terms_of
from spec.errors import ConfigError
from spec.exchange import (
    Abort,
    Close,
    Finish,
    Mismatch,
    Report,
    Steps,
    Tally,
    decide,
    decode,
    encode,
    merge,
    paper_target,
    tally_of,
)

CONFIG = Config(Budget(8), window=16)
numbers = st.integers(0, 2**62 - 1)


@st.composite
def tallies(draw: st.DrawFn) -> Tally:
    terms = st.tuples(*[numbers] * len(Terms._fields)).map(lambda t: Terms(*t))
    low, high = draw(terms), draw(terms)
    return Tally(low, high, *(draw(numbers) for _ in range(len(Tally._fields) - 2)))


@given(tallies(), tallies(), tallies())
def test_merge_is_associative_commutative_and_idempotent(a: Tally, b: Tally, c: Tally) -> None:
    assert merge(a, merge(b, c)) == merge(merge(a, b), c)
    assert merge(a, b) == merge(b, a)
    assert merge(a, a) == a


@given(st.lists(tallies(), min_size=1, max_size=5))
def test_an_elementwise_maximum_on_the_wire_is_a_merge(parts: list[Tally]) -> None:
    wire = tuple(max(column) for column in zip(*map(encode, parts), strict=True))
    assert decode(wire) == reduce(merge, parts)
    assert all(-(2**63) <= value < 2**63 for value in wire)


def report(want: int, limit: int, **changes: object) -> Report:
    terms = terms_of(CONFIG, Place(epoch=2, round=1, step=9))
    flags = {"has_spare": True, "waiting": False, "failed": False, "closed": False}
    return Report(terms, want, limit, **flags)._replace(**changes)


def tally(*reports: Report) -> Tally:
    return reduce(merge, (tally_of(r, i, len(reports)) for i, r in enumerate(reports)))


def decision(*reports: Report, config: Config = CONFIG) -> object:
    merged = tally(*reports)
    return decide(config, len(reports), merged, paper_target(merged))


def test_the_target_is_the_most_wanted_but_no_more_than_the_fewest_samples() -> None:
    assert decision(report(3, 9), report(5, 7)) == Steps(5, None)
    assert decision(report(3, 3), report(5, 7)) == Steps(3, None)


def test_a_drained_rank_limits_nobody() -> None:
    assert decision(report(5, 9), report(0, CONFIG.window)) == Steps(5, None)


def test_the_epoch_finishes_when_nobody_wants_a_step() -> None:
    assert decision(report(0, 16), report(0, 16)) == Finish()


def test_without_a_quota_the_first_drained_rank_ends_quota_mode() -> None:
    quota_mode = Config(Budget(8), window=16, mode=Mode.QUOTA)
    assert decision(report(5, 9), report(0, 16), config=quota_mode) == Finish()
    with_quota = Config(Budget(8), window=16, mode=Mode.QUOTA, quota=100)
    assert decision(report(5, 9), report(0, 16), config=with_quota) == Steps(5, None)


def test_a_rank_that_never_saw_a_sample_borrows_one_from_the_lowest_that_has() -> None:
    poor = report(0, 16, has_spare=False)
    assert decision(poor, report(2, 4), report(3, 5)) == Steps(3, 1)
    stop = Config(Budget(8), window=16, idle=Idle.STOP)
    assert decision(poor, report(2, 4), report(3, 5), config=stop) == Steps(3, None)


def test_failure_goes_before_close_and_both_name_the_lowest_rank() -> None:
    failed, closed = report(0, 16, failed=True), report(0, 16, closed=True)
    assert decision(report(2, 2), closed, closed) == Close(1)
    assert decision(closed, report(2, 2), failed, failed) == Abort(2)


@pytest.mark.parametrize("term", Terms._fields)
def test_a_difference_in_any_term_is_named_with_both_values(term: str) -> None:
    terms = report(1, 1).terms
    other = terms._replace(**{term: getattr(terms, term) + 3})
    found = decision(report(1, 1), report(1, 1, terms=other, failed=True))
    assert found == Mismatch(term, getattr(terms, term), getattr(terms, term) + 3)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"window": 0}, "window"),
        ({"slow_start": -1}, "slow_start"),
        ({"seed": -1}, "seed"),
        ({"quota": 5}, "join=False"),
        ({"quota": 0, "mode": Mode.QUOTA}, "quota"),
        ({"mode": Mode.QUOTA, "idle": Idle.STOP}, 'idle="pad"'),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Config(Budget(8), **settings)  # type: ignore[arg-type]
