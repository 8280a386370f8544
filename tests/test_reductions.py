"""Reductions leave out states, never findings: each agrees with the unreduced search.

Promise by promise this is about trust in the checker: `model_check.closed` argues why the order of
actions that is left out does not matter; here the argument meets every small world there is.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from model_check import closed
from model_check.closed import ClosedSystem, Reduction
from model_check.explorer import Limits, Verdict, explore
from model_check.profiles import JOIN_PAD, JOIN_STOP, LONG, SHORT, for_mutants
from model_check.reductions import COMBINATIONS, ReductionRow, compare, reduction_table
from spec.variants import VARIANTS
from spec.world import Activity, Faults, Habits, Node, Stop, World

LIMITS = Limits(states=400_000)


@pytest.fixture(scope="module")
def table() -> list[ReductionRow]:
    return reduction_table(for_mutants(), LIMITS)


def test_the_shipped_protocol_holds_under_every_reduction(table: list[ReductionRow]) -> None:
    for row in table:
        assert {search.verdict for search in row.searches} == {Verdict.HOLDS}, row.case


def test_no_reduction_loses_a_goal_or_an_end(table: list[ReductionRow]) -> None:
    for row in table:
        unreduced, *reduced = row.searches
        assert unreduced.goals, row.case
        assert unreduced.ends, row.case
        for search in reduced:
            assert search.goals == unreduced.goals, (row.case, search.reduction)
            assert search.ends == unreduced.ends, (row.case, search.reduction)
        assert row.agree


def test_reductions_reduce(table: list[ReductionRow]) -> None:
    """Two ranks can be named in two ways, so symmetry wins at most 2. Ample sets are not used while
    a fault may strike, as ranks then compete for it; that leaves little in worlds with faults."""
    for row in table:
        faulty = "fault" in row.case
        # Blocks are tried with one kind of sample, so that more states are their own mirror image.
        blocks = row.case.startswith("blocks")
        assert (1.7 if blocks else 1.9) < row.factor("symmetry") <= 2.0, row.case
        assert (1.05 if faulty else 1.5) < row.factor("ample") < 2.2, row.case
        assert row.factor("both") > (2.1 if faulty else 2.6 if blocks else 2.9), row.case
        assert row.factor("both") > max(row.factor("symmetry"), row.factor("ample"))
    print(report(table))


def test_reductions_win_more_with_more_ranks() -> None:
    three = compare("3 ranks", World(JOIN_PAD, 3, (LONG,), 2))
    assert three.agree
    assert three.searches[0].verdict is Verdict.HOLDS
    assert three.factor("symmetry") > 4
    assert three.factor("ample") > 3
    assert three.factor("both") > 12


def report(table: list[ReductionRow]) -> str:
    lines = [f"{'':48}" + "".join(f"{name:>22}" for name, _ in COMBINATIONS)]
    for row in table:
        cells = (
            f"{s.states:>10,} x{row.factor(s.reduction):<4.1f}{s.seconds:>4.1f}s"
            for s in row.searches
        )
        lines.append(f"{row.case:48}" + "  ".join(cells))
    return "\n".join(lines)


# ---------------------------------------------------------------- variants

PLAIN = World(JOIN_PAD, 2, (SHORT, LONG), 2)
FAULTY = replace(PLAIN, faults=Faults(1))
QUOTA = next(case.world for case in for_mutants() if case.name == "quota mode, quota 2")
THREE = next(case.world for case in for_mutants() if case.name == "join, idle pad: window 3")
TWICE = World(JOIN_PAD, 2, (LONG,), 2, epochs=2, stop=Stop.TOGETHER)

FALLS = [
    ("target-ignores-smallest", PLAIN, "step-alignment"),
    ("drained-ranks-leave", PLAIN, "deadlock-freedom"),
    ("no-split", PLAIN, "step-alignment"),
    ("never-lends", PLAIN, "deadlock-freedom"),
    ("carry-dropped", PLAIN, "identity-coverage"),
    ("delivers-twice", PLAIN, "identity-coverage"),
    ("one-token-more", PLAIN, "budget"),
    ("steps-reversed", PLAIN, "step-alignment"),
    ("queue-unbounded", PLAIN, "bounded-memory"),
    ("longer-window", replace(PLAIN, samples=3), "bounded-memory"),
    ("failed-ranks-leave", FAULTY, "deadlock-freedom"),
    ("abort-overtakes-steps", FAULTY, "uniform-abort"),
    ("failed-batch-forgotten", FAULTY, "identity-coverage"),
    ("quota-by-own-count", QUOTA, None),
    ("slot-not-released", TWICE, "deadlock-freedom"),
    ("retired-ranks-leave", replace(PLAIN, config=JOIN_STOP), "deadlock-freedom"),
    ("published-overflow", THREE, None),
    ("published-no-exchange", PLAIN, None),
]
"""(variant, world, the promise that falls; None: any that the variant is said to break)."""


@pytest.mark.parametrize(("name", "world", "promise"), FALLS, ids=[name for name, *_ in FALLS])
def test_a_variant_falls_by_the_same_promise_under_every_reduction(
    name: str, world: World, promise: str | None
) -> None:
    variant = VARIANTS[name]
    row = compare(name, variant.within(world), LIMITS)
    assert {search.verdict for search in row.searches} == {Verdict.REFUTED}
    fallen = {search.promise for search in row.searches}
    assert len(fallen) == 1, fallen
    assert fallen <= ({promise} if promise else set(variant.falls))
    assert row.agree


def test_a_comparison_that_differs_does_not_agree() -> None:
    """The negative arm of the tests above."""
    row = compare("plain", World(JOIN_PAD, 2, (LONG,), 1))
    assert row.agree
    first, *rest = row.searches
    for wrong in (
        replace(first, verdict=Verdict.REFUTED),
        replace(first, goals=frozenset({"carry"})),
        replace(first, ends=frozenset()),
    ):
        assert not ReductionRow("wrong", (wrong, *rest)).agree


# ---------------------------------------------------------------- where an ample set is none


def looks_away(node: Node, capacity: int) -> bool:
    """A batcher that will not put step 1 of the first round into its queue once its trainer waits
    for it: what it may do depends on where its trainer is."""
    pending = node.machine.pending
    due = bool(pending) and pending[0].number == 1 and pending[0].round == 0
    waited_for = node.trainer is Activity.READY and node.steps == 1
    return len(node.queue) < capacity and not (due and waited_for)


def test_a_batcher_that_looks_at_its_trainer_is_not_taken_for_independent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While its trainer is in a gradient, only a batcher's actions are explored, on the assumption
    that it does not matter to them where the trainer is. Habits may break that assumption, so it is
    made for the loader's own alone. Here is what it would miss."""
    world = World(JOIN_PAD, 2, (LONG,), 2, habits=Habits(has_room=looks_away))
    row = compare("looks away", world)
    assert row.agree
    assert row.searches[0].promise == "deadlock-freedom"
    monkeypatch.setattr(closed, "FAITHFUL", world.habits)  # as if these were the loader's own
    system = ClosedSystem(world, Reduction(ample=True))
    assert explore(system, system.question()).verdict is Verdict.HOLDS


@pytest.mark.parametrize("name", ["epochs-overlap-unnoticed", "published-no-exchange"])
def test_epochs_in_a_row_under_join(name: str) -> None:
    """A trainer that is through waits for the others to be through as well, and they may meet
    without it: its next epoch is not its own affair."""
    world = World(JOIN_STOP, 2, (LONG,), 2, epochs=2, stop=Stop.TOGETHER)
    row = compare(name, VARIANTS[name].within(world), LIMITS)
    assert {search.verdict for search in row.searches} == {Verdict.REFUTED}
    assert row.agree
