"""Every promise holds for random epochs, and each is broken by a mutant of the protocol."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_check import promises, small_scope
from model_check.promises import PROMISES, Epoch, violations
from model_check.small_scope import Scope, check
from spec import alignment, exchange, grouping
from spec.alignment import Alignment
from spec.config import Budget, Config, Mode
from spec.exchange import Decision, Finish, Tally
from spec.lockstep import EpochRecord, Play, run_epoch
from spec.rank import Rules
from spec.samples import Counts, Group, Sample
from tests.strategies import configs, shards


@settings(max_examples=400, deadline=None)
@given(configs(), st.data())
def test_random_epochs_keep_every_promise(config: Config, data: st.DataObject) -> None:
    extras = len(config.budget.extras)
    ranks = data.draw(st.lists(shards(extras=extras), min_size=1, max_size=4))
    record = run_epoch(config, ranks)
    assert violations(Epoch(config, ranks, record)) == {}


@settings(max_examples=100, deadline=None)
@given(configs(), st.data())
def test_the_target_may_be_anything_in_the_envelope(config: Config, data: st.DataObject) -> None:
    ranks = data.draw(st.lists(shards(extras=len(config.budget.extras)), min_size=1, max_size=3))
    picks = data.draw(st.integers(0, 2**30))

    def target(tally: Tally) -> int:
        return 1 + picks % tally.limit

    record = run_epoch(config, ranks, Play(Rules(target=target)))
    broken = violations(Epoch(config, ranks, record))
    assert broken == {}


def test_the_small_scope_holds_and_says_what_it_covered() -> None:
    result = check()
    assert result.holds, str(result)
    assert result.epochs == 6792
    assert "6,792 epochs" in str(result)


# ---------------------------------------------------------------- mutants


def ignore_limit(tally: Tally) -> int:
    return tally.want


def drop_the_carry(groups: tuple[Group, ...], target: int) -> Alignment:
    return Alignment(alignment.align(groups, target).groups, ())


def carry_the_oldest(groups: tuple[Group, ...], target: int) -> Alignment:
    """Keeps the youngest groups: the oldest may wait for ever."""
    if len(groups) <= target:
        return alignment.align(groups, target)
    by_age = sorted(groups, key=lambda g: -min(s.seq for s in g))
    carried = sorted((s for g in by_age[target:] for s in g), key=lambda s: s.seq)
    return Alignment(tuple(by_age[:target]), tuple(carried))


def double_a_sample(groups: tuple[Group, ...], target: int) -> Alignment:
    first, *rest = alignment.align(groups, target).groups
    return Alignment(((*first, first[0]), *rest), alignment.align(groups, target).carried)


def overfill(budget: Budget, samples: tuple[Sample, ...]) -> tuple[Group, ...]:
    return grouping.group(Budget(budget.tokens + 1), samples)


def longest_alone(budget: Budget, samples: tuple[Sample, ...]) -> tuple[Group, ...]:
    ordered = sorted(samples, key=lambda s: (-s.cost, s.seq))
    return (tuple(ordered[:1]), *grouping.group(budget, ordered[1:])) if ordered else ()


def finish_when_any_is_drained(
    config: Config, world_size: int, tally: Tally, target: int
) -> Decision:
    return Finish() if tally.any_drained else exchange.decide(config, world_size, tally, target)


MUTANTS: dict[str, tuple[Rules, str]] = {
    "the target ignores the smallest sample count": (Rules(target=ignore_limit), "step-alignment"),
    "the carry is dropped": (Rules(align=drop_the_carry), "identity-coverage"),
    "a sample is delivered twice": (Rules(align=double_a_sample), "identity-coverage"),
    "groups may exceed the budget by one": (Rules(group=overfill), "budget"),
    "the longest sample travels alone": (Rules(group=longest_alone), "full-groups"),
    "join ends with the first drained rank": (
        Rules(decide=finish_when_any_is_drained),
        "identity-coverage",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_breaks_the_promise_that_guards_against_it(name: str) -> None:
    rules, promise = MUTANTS[name]
    result = check(scopes=(Scope(2, 2),), rules=rules)
    assert not result.holds
    assert result.counterexample is not None
    assert promise in result.counterexample


def epoch_of(config: Config, ranks: Sequence[Sequence[int]], rules: Rules | None = None) -> Epoch:
    made = [tuple(Sample(i, c, c) for i, c in enumerate(costs)) for costs in ranks]
    return Epoch(config, made, run_epoch(config, made, Play(rules or Rules())))


def tampered(epoch: Epoch, rank: int, **changes: object) -> Epoch:
    """The epoch with some facts of one rank's record replaced."""
    for name, value in changes.items():
        setattr(epoch.record.ranks[rank], name, value)
    return epoch


def sound() -> Epoch:
    return epoch_of(Config(Budget(4), window=2, slow_start=2), [[4, 4, 1], [2, 2]])


def test_carrying_the_oldest_starves_it() -> None:
    # One rank has a single sample left in every round, so that T = 1 and the other must carry.
    config = Config(Budget(4), window=2, slow_start=2)
    one_by_one = [4, 2, 4, 4, 4, 4]
    slow: list[list[int]] = [one_by_one, [4]]
    rules = Rules(align=carry_the_oldest, target=lambda tally: 1)
    assert promises.bounded_delay(epoch_of(config, slow, rules)) is not None
    assert promises.bounded_delay(epoch_of(config, slow, Rules(target=lambda tally: 1))) is None


def test_promises_notice_what_no_rule_can_break() -> None:
    """Arms for promises that the machine itself keeps, by tampering with the record."""
    steps = sound().record.ranks[0].steps
    assert promises.step_alignment(tampered(sound(), 0, steps=steps[:-1])) is not None
    renumbered = [step._replace(number=step.number + 1) for step in steps]
    assert promises.step_alignment(tampered(sound(), 0, steps=renumbered)) is not None
    assert promises.bounded_memory(tampered(sound(), 0, most_held=3)) is not None
    wrong = [step._replace(total=Counts(9, 9, 9)) for step in steps]
    assert promises.exact_gradient(tampered(sound(), 0, steps=wrong)) is not None
    assert promises.idle_mode(tampered(sound(), 0, steps=[steps[0]._replace(group=()), steps[0]]))
    many = Epoch(sound().config, sound().shards, EpochRecord(sound().record.ranks, rounds=99))
    assert promises.bounded_termination(many) is not None
    assert violations(sound()) == {}


def test_quota_closure_notices_both_too_early_and_too_late() -> None:
    config = Config(Budget(4), window=4, slow_start=4, mode=Mode.QUOTA, quota=3)
    epoch = epoch_of(config, [[4, 4, 4], [4, 4]])
    assert promises.quota_closure(epoch) is None
    steps = epoch.record.ranks[0].steps
    assert promises.quota_closure(tampered(epoch, 0, steps=[*steps, steps[0]])) is not None
    short = epoch_of(config, [[4, 4, 4], [4, 4]])
    for rank in (0, 1):
        tampered(short, rank, steps=short.record.ranks[rank].steps[:1])
    assert promises.quota_closure(short) is not None


def test_every_promise_has_a_test_that_breaks_it() -> None:
    broken_by_mutants = {promise for _, promise in MUTANTS.values()}
    broken_here = {
        "bounded-delay",
        "bounded-memory",
        "bounded-termination",
        "exact-gradient",
        "idle-mode",
        "quota-closure",
    }
    assert broken_by_mutants | broken_here == set(PROMISES)


def test_bounded_termination_is_reached() -> None:
    """The bound is exact: single samples, one in each round."""
    epoch = epoch_of(Config(Budget(1), window=1), [[1, 1, 1], [1]])
    assert len(epoch.record.ranks[0].steps) == 3
    assert epoch.record.rounds == 4


def test_bounded_delay_is_reached() -> None:
    """With the smallest target, the youngest of a full window waits a whole window of rounds."""
    config = Config(Budget(1), window=3, slow_start=3)
    epoch = epoch_of(config, [[1, 1, 1]], Rules(target=lambda tally: 1))
    assert [step.round for step in epoch.record.ranks[0].steps] == [0, 1, 2]


def test_the_small_scope_names_the_smallest_epoch() -> None:
    result = check(scopes=(Scope(2, 2),), rules=Rules(align=drop_the_carry))
    assert "costs" in str(result)
    assert "BROKEN" in str(result)
    assert small_scope.KINDS == (0, 1, 2, 5)
