"""The explorer finds what is known of models that others wrote, and never says more than it saw."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from model_check.explorer import (
    Broken,
    Exploration,
    Goal,
    Limits,
    Property,
    Question,
    Verdict,
    explore,
)
from tests.known_models import (
    ABORTED,
    COMMITTED,
    AfterYou,
    Graph,
    Increments,
    LinearEquation,
    TwoLocks,
    TwoPhaseCommit,
)

# ---------------------------------------------------------------- published counts


@dataclass(frozen=True)
class Known:
    """What others count: `generated` and `depth` with the initial state, so one more than ours."""

    rms: int
    states: int
    generated: int
    depth: int
    orbits: int


TWO_PHASE = [Known(3, 288, 1_146, 11, 80), Known(5, 8_832, 58_146, 17, 314)]
TWO_PHASE_LARGE = Known(7, 296_448, 2_744_706, 23, 920)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("known", [*TWO_PHASE, TWO_PHASE_LARGE], ids=lambda k: f"n={k.rms}")
def test_two_phase_commit_has_the_published_counts(known: Known) -> None:
    model = TwoPhaseCommit(known.rms)
    goals = [
        Goal("all commit", lambda state: model.all_at(state, COMMITTED)),
        Goal("all abort", lambda state: model.all_at(state, ABORTED)),
    ]
    found = explore(model, Question([Property(model.consistent)], goals))
    assert found.verdict is Verdict.HOLDS
    assert found.states == known.states
    assert found.transitions == known.generated - 1
    assert found.depth == known.depth - 1


@pytest.mark.parametrize("known", [*TWO_PHASE, TWO_PHASE_LARGE], ids=lambda k: f"n={k.rms}")
def test_two_phase_commit_has_the_published_orbits(known: Known) -> None:
    model = TwoPhaseCommit(known.rms, symmetric=True)
    found = explore(model, Question([Property(model.consistent)]))
    assert found.verdict is Verdict.HOLDS
    assert found.states == known.orbits
    assert found.depth == known.depth - 1


@pytest.mark.parametrize("known", TWO_PHASE, ids=lambda k: f"n={k.rms}")
def test_orbits_are_those_of_the_states_that_the_unreduced_search_visits(known: Known) -> None:
    visited: set[int] = set()
    model = TwoPhaseCommit(known.rms)
    reduced = TwoPhaseCommit(known.rms, symmetric=True)
    kept: set[int] = set()
    explore(model, Question([Property(lambda state: visited.add(state))]))
    explore(reduced, Question([Property(lambda state: kept.add(state))]))
    assert {model.canonical(state) for state in visited} == kept


def test_a_manager_that_forgets_to_ask_one_is_found_inconsistent() -> None:
    """The negative arm: without it the agreement above could be about nothing."""
    model = TwoPhaseCommit(3)
    model.all_counted &= model.all_counted >> 4
    found = explore(model, Question([Property(model.consistent)]))
    assert found.verdict is Verdict.REFUTED
    assert found.violation is not None
    # Two prepare and are counted, one aborts; the manager commits, and one that hears it does.
    assert len(found.violation.actions) == 2 + 2 + 1 + 1 + 1


def test_the_linear_equation_that_has_a_solution() -> None:
    model = LinearEquation(2, 10, 14)
    found = explore(model, Question([Property(model.found, at_end=True)]))
    assert found.violation is not None
    assert found.violation.actions == ("x", "x", "y")
    assert found.violation.states[-1] == (2, 1)
    assert (found.states, found.transitions + 1, found.depth + 1) == (12, 15, 4)


def test_the_linear_equation_that_has_none() -> None:
    model = LinearEquation(2, 4, 7)
    found = explore(model, Question([Property(model.found, at_end=True)]))
    assert found.verdict is Verdict.HOLDS
    assert found.states == 65_536
    assert found.transitions == 2 * 65_536
    assert found.ends == 0


@pytest.mark.parametrize(("symmetric", "states"), [(False, 13), (True, 8)])
def test_increments_without_a_lock(symmetric: bool, states: int) -> None:
    model = Increments(2, symmetric)
    assert explore(model, Question()).states == states
    found = explore(model, Question([Property(model.nothing_lost)]))
    assert found.verdict is Verdict.REFUTED
    assert found.violation is not None
    assert len(found.violation.actions) == 4  # both read before either writes
    assert found.violation.states[-1].counter == 1


# ---------------------------------------------------------------- counterexamples


def refuted_by(found: Exploration[object, object]) -> tuple[str, tuple[object, ...]]:
    assert found.verdict is Verdict.REFUTED
    assert found.violation is not None
    assert len(found.violation.states) - len(found.violation.actions) in (0, 1)
    return found.violation.promise, found.violation.states


def never(bad: object) -> Property[object]:
    return Property(lambda state: Broken("never", str(bad)) if state == bad else None)


def no_end(bad: object) -> Property[object]:
    return Property(lambda state: Broken("no-end", str(bad)) if state == bad else None, True)


DIAMOND = Graph({0: [1, 2], 1: [3], 2: [9], 3: [9]}, [0])
"""A long way to 9, which is listed first, and a short one."""


def test_the_counterexample_is_a_shortest_one() -> None:
    found = explore(DIAMOND, Question([never(9)]))
    assert refuted_by(found) == ("never", (0, 2, 9))
    assert found.violation is not None
    assert found.violation.actions == (2, 9)


def test_a_nearer_end_is_preferred_to_a_state_one_action_further() -> None:
    """2 is as far away as 1, and waits for its turn when 3 is found behind 1."""
    model = Graph({0: [1, 2], 1: [3]}, [0])
    assert refuted_by(explore(model, Question([never(3), no_end(2)]))) == ("no-end", (0, 2))
    assert refuted_by(explore(model, Question([never(3), no_end(7)]))) == ("never", (0, 1, 3))
    raising = Graph({0: [1, 2], 1: [ValueError("x")]}, [0])
    assert refuted_by(explore(raising, Question([no_end(2)]))) == ("no-end", (0, 2))


def test_the_trace_is_the_same_every_time() -> None:
    model = Increments(3)
    runs = [explore(model, Question([Property(model.nothing_lost)])) for _ in range(3)]
    assert runs[0].violation == runs[1].violation == runs[2].violation
    assert len({(run.states, run.transitions, run.depth) for run in runs}) == 1


def test_an_initial_state_may_be_the_counterexample() -> None:
    assert refuted_by(explore(DIAMOND, Question([never(0)]))) == ("never", (0,))
    assert refuted_by(explore(Graph({}, [4, 5]), Question([no_end(5)]))) == ("no-end", (5,))


def test_an_action_that_raises_is_a_violation() -> None:
    model = Graph({0: [1], 1: [ValueError("no such step"), 2]}, [0])
    found = explore(model, Question(raises="step-alignment"))
    promise, states = refuted_by(found)
    assert promise == "step-alignment"
    assert states == (0, 1)
    assert found.violation is not None
    assert found.violation.text == "ValueError: no such step"
    assert len(found.violation.actions) == 2  # the last one raised
    with pytest.raises(MemoryError):
        explore(Graph({0: [MemoryError()]}, [0]), Question())


def test_a_property_of_ends_is_asked_of_ends_alone() -> None:
    everywhere = Property(lambda state: Broken("ends", str(state)), at_end=True)
    found = explore(DIAMOND, Question([everywhere]))
    assert refuted_by(found) == ("ends", (0, 2, 9))
    assert found.ends == 1
    locks = TwoLocks(ordered=True)
    assert explore(locks, Question([everywhere])).verdict is Verdict.HOLDS


# ---------------------------------------------------------------- goals, limits


def test_a_goal_that_nothing_reaches_refutes() -> None:
    goals = [Goal("nine", lambda s: s == 9), Goal("ten", lambda s: s == 10)]
    found = explore(DIAMOND, Question([never(11)], goals))
    assert found.violation is None
    assert found.complete
    assert found.verdict is Verdict.REFUTED
    assert found.unmet == ["ten"]
    assert explore(DIAMOND, Question(goals=goals[:1])).verdict is Verdict.HOLDS


@pytest.mark.parametrize("limits", [Limits(states=100), Limits(seconds=0.0)])
def test_what_was_given_up_is_unknown_whatever_was_seen(limits: Limits) -> None:
    model = TwoPhaseCommit(3)
    seen = Goal("the beginning", lambda state: state == 0)
    found = explore(model, Question([Property(model.consistent)], [seen]), limits)
    assert found.verdict is Verdict.UNKNOWN
    assert not found.complete
    assert found.states <= 100 + 12  # it stops behind the state that went over the limit


def test_a_limit_that_is_just_enough_is_no_limit() -> None:
    model = TwoPhaseCommit(3)
    question = Question([Property(model.consistent)])
    assert explore(model, question, Limits(states=288)).verdict is Verdict.HOLDS
    assert explore(model, question, Limits(states=287)).verdict is Verdict.UNKNOWN


def test_a_violation_within_the_limit_refutes() -> None:
    endless = LinearEquation(1, 0, 3)
    found = explore(endless, Question([Property(endless.found)]), Limits(states=20))
    assert found.verdict is Verdict.REFUTED


def test_a_model_with_no_initial_state_reaches_no_goal() -> None:
    found = explore(Graph[int]({}, []), Question(goals=[Goal("any", lambda state: True)]))
    assert found.verdict is Verdict.REFUTED
    assert found.unmet == ["any"]


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    explore(TwoPhaseCommit(5), Question(), progress=lambda *args: told.append(args))
    assert told[0] == (1, 0)
    assert len(told) == 9
    assert told == sorted(told)


# ---------------------------------------------------------------- termination

ENDS = Question[object](terminates="ends")


@pytest.mark.parametrize(
    ("edges", "states", "repeats"),
    [
        ({0: [1], 1: [1, 2]}, (0, 1, 1), 1),
        ({0: [1], 1: [2], 2: [1, 3]}, (0, 1, 2, 1), 1),
        ({0: [1, 2], 1: [3], 3: [4], 4: [3], 2: [0]}, (0, 2, 0), 0),
        ({0: [1], 1: [2], 2: [3, 4], 3: [1], 4: [2]}, (0, 1, 2, 3, 1), 1),
    ],
    ids=["self-loop", "2-cycle", "the nearest of two", "one cycle in another"],
)
def test_a_cycle_is_found_and_shown(
    edges: dict[int, list[int]], states: tuple[int, ...], repeats: int
) -> None:
    model = Graph(edges, [0])
    found = explore(model, ENDS)
    assert refuted_by(found) == ("ends", states)
    assert found.violation is not None
    assert found.violation.repeats == repeats
    assert found.violation.actions == states[1:]
    # A question that does not ask does not hear of it.
    assert explore(model, Question()).verdict is Verdict.HOLDS


@pytest.mark.parametrize("edges", [{}, {0: [1, 2], 1: [3], 2: [3]}, {0: [1, 1], 1: [2]}])
def test_what_has_no_cycle_terminates(edges: dict[int, list[int]]) -> None:
    assert explore(Graph(edges, [0]), ENDS).verdict is Verdict.HOLDS


def test_a_broken_promise_comes_before_a_cycle() -> None:
    found = explore(Graph({0: [0, 1]}, [0]), Question([no_end(1)], terminates="ends"))
    assert refuted_by(found)[0] == "no-end"


def test_processes_that_yield_to_each_other_may_do_so_for_ever() -> None:
    found = explore(AfterYou(turns=False), Question(terminates="ends"))
    promise, states = refuted_by(found)
    assert promise == "ends"
    assert found.violation is not None
    assert states[found.violation.repeats or 0] == states[-1]
    assert explore(AfterYou(turns=True), Question(terminates="ends")).verdict is Verdict.HOLDS
