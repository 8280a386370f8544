"""Random runs: reproducible, judged by every promise, and short when they fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model_check.closed import ClosedSystem
from model_check.explorer import Limits, Verdict, explore
from model_check.goals import GOALS
from model_check.live import Live, longest_run
from model_check.profiles import MODE_NAMES
from model_check.random_worlds import draw_setting
from model_check.schedulers import Policy, Scheduler
from model_check.shrink import Script
from model_check.simulate import SimulationOptions, SimulationResult, replay, simulate
from spec.enabled import actions
from spec.errors import ConfigError
from spec.system import act
from spec.variants import VARIANTS
from spec.world import FAITHFUL, SHIPPED, Exchange, Gradient

SMALL = SimulationOptions(ranks=4, runs=400, seed=3)

# ---------------------------------------------------------------- the shipped protocol


def test_the_shipped_protocol_survives_at_16_ranks_with_faults() -> None:
    options = SimulationOptions(ranks=16, samples=5, faults=2, runs=150, seed=1)
    result = simulate(options)
    assert result.failure is None, str(result)
    assert result.runs == 150
    assert result.actions > 20_000
    assert result.longest_run > 500
    # It did not survive by doing nothing.
    for goal in ("carry", "split", "idle step", "borrowed spare", "peer lost", "queue full"):
        assert result.goals[goal] > 0, goal


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_every_goal_of_a_mode_is_reached_with_few_ranks(mode: str) -> None:
    result = simulate(SimulationOptions(ranks=3, faults=2, runs=800, seed=4, mode=mode))
    assert result.failure is None, str(result)
    blocks = {
        "block across rounds",
        "shorter last block",
        "failure while steps wait",
        "window and block full",
    }
    elsewhere = {
        "join-pad": {"retired trainer", "quota withdraws"},
        "join-stop": {"borrowed spare", "quota withdraws", *blocks},
        "quota": {"retired trainer"},
    }
    lucky = {"surrender"}  # two faults on one rank, one right behind the other
    assert set(result.unmet) - lucky == elsewhere[mode]


def test_64_ranks_are_no_slower_by_the_action() -> None:
    result = simulate(SimulationOptions(ranks=64, runs=4, seed=7))
    assert result.failure is None, str(result)
    assert result.longest_run > 1000
    assert result.actions / result.seconds > 1000  # measured: 20,000


# ---------------------------------------------------------------- honest results


def test_a_result_says_what_was_covered_and_never_that_it_is_proved() -> None:
    result = simulate(replace(SMALL, runs=20))
    assert result.verdict is Verdict.UNKNOWN
    text = str(result)
    assert text.startswith("UNKNOWN: no promise broken in 20 random runs of 4 ranks")
    assert "a sample, not all there are" in text
    for word in ("proved", "PROVED", "holds", "HOLDS", "verified"):
        assert word not in text
    assert set(result.goals) == set(GOALS)
    assert f"{len(GOALS) - len(result.unmet)} of {len(GOALS)} goals" in text


def test_what_has_no_end_or_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="seconds or runs"):
        SimulationOptions()
    for wrong in ({"ranks": 0}, {"samples": 0}, {"faults": -1}, {"mode": "sideways"}):
        with pytest.raises(ConfigError, match="must be"):
            replace(SMALL, **wrong)  # type: ignore[arg-type]


def test_it_ends_when_its_time_is_up_and_tells_how_it_goes() -> None:
    told: list[tuple[int, int]] = []
    result = simulate(
        replace(SMALL, runs=None, seconds=0.3), progress=lambda *args: told.append(args)
    )
    assert 0.3 <= result.seconds < 5
    assert told[-1] == (result.runs, result.actions)
    assert len(told) == result.runs


# ---------------------------------------------------------------- reproducible


def test_a_run_depends_on_seed_and_number_alone() -> None:
    first, second = (replay(SMALL, run) for run in (5, 5))
    assert first == second
    assert replay(replace(SMALL, runs=7), 5) == first  # however many there are
    assert replay(SMALL, 6) != first
    assert replay(replace(SMALL, seed=4), 5) != first


def test_a_failure_is_replayed_by_its_number_and_shrinks_to_the_same_run() -> None:
    options = replace(SMALL, variant=VARIANTS["carry-dropped"])
    first, second = simulate(options), simulate(options)
    assert first.failure is not None
    assert first.failure == second.failure
    assert (first.runs, first.actions) == (second.runs, second.actions)
    played = replay(options, first.failure.run)
    assert played.promise == first.failure.promise == "identity-coverage"
    assert len(played.actions) == first.failure.length_before


def test_a_run_is_one_of_the_closed_system() -> None:
    """What was performed can be performed again by `spec.system` alone, every action enabled."""
    seen = set()
    for run in range(40):
        played = replay(SMALL, run)
        seen.add(played.policy)
        world, state = played.setting.world, played.setting.start
        assert world.rules == SHIPPED
        assert world.habits == FAITHFUL
        for action in played.actions:
            assert action in set(actions(world, state)), (run, action)
            state = act(world, state, action)
        assert not any(actions(world, state._replace(faults=0, stops=0)))
        assert len(played.actions) <= longest_run(world)
    assert seen == set(Policy)


def test_what_is_enabled_is_kept_up_to_date() -> None:
    """The incremental answer is that of `spec.enabled`, in every state."""
    for run in range(25):
        rng = SMALL.random(run)
        setting = draw_setting(replace(SMALL, faults=2), rng)
        live = Live(setting.world, setting.start)
        scheduler = Scheduler(live, rng)
        while (action := scheduler.choose()) is not None:
            expected = set(actions(live.world, live.state))
            ranks = range(live.world.world_size)
            assert {*live.meetings()} | {
                a for r in ranks for a in (*live.usual(r), *live.mishaps(r))
            } == expected
            assert sorted(live.ready) == [r for r in ranks if live.usual(r)]
            assert all(map(live.enabled, expected))
            live.perform(action)


# ---------------------------------------------------------------- variants fall, and shrink

FALLS = [
    ("target-ignores-smallest", "step-alignment"),
    ("never-lends", "deadlock-freedom"),
    ("drained-ranks-leave", "deadlock-freedom"),
    ("published-finished-rank", "deadlock-freedom"),
    ("end-needs-a-slot", "deadlock-freedom"),
    ("carry-dropped", "identity-coverage"),
    ("split-drops-one", "identity-coverage"),
    ("published-late-filter", "identity-coverage"),
    ("one-token-more", "budget"),
    ("oversize-in-company", "budget"),
    ("abort-overtakes-steps", "uniform-abort"),
    ("finish-asked-again", "bounded-termination"),
    ("queue-unbounded", "bounded-memory"),
    ("carry-keeps-youngest", "bounded-delay"),
]


def shrunk(result: SimulationResult, promise: str) -> tuple[int, int]:
    """The length of a shrunk failure, and of a shortest one in the world that it was shrunk to."""
    failure = result.failure
    assert failure is not None, str(result)
    assert result.verdict is Verdict.REFUTED
    assert failure.promise == promise
    assert str(result).startswith(f"REFUTED: run {failure.run} of seed {failure.seed} broke")
    system = ClosedSystem(failure.world)
    minimal = explore(system, system.question(), Limits(states=100_000)).violation
    assert minimal is not None
    return failure.length, len(minimal.actions)


@pytest.mark.parametrize(("name", "promise"), FALLS, ids=[name for name, _ in FALLS])
def test_a_variant_is_found_and_shrinks_to_a_short_run(name: str, promise: str) -> None:
    result = simulate(replace(SMALL, variant=VARIANTS[name]))
    length, minimal = shrunk(result, promise)
    failure = result.failure
    assert failure is not None
    assert length <= failure.length_before
    assert minimal <= length <= 2 * minimal
    assert failure.world.world_size <= 2
    # The shrunk run is whole: each action leads from one of its states to the next.
    run = failure.violation
    for before, action, after in zip(run.states, run.actions, run.states[1:], strict=False):
        assert act(failure.world, before, action) == after
    if promise == "bounded-termination":
        assert run.repeats is not None
        assert run.states[run.repeats] == run.states[-1]


def test_a_failure_of_many_ranks_shrinks_to_one_of_two() -> None:
    options = SimulationOptions(ranks=32, runs=20, seed=5, variant=VARIANTS["never-lends"])
    result = simulate(options)
    length, minimal = shrunk(result, "deadlock-freedom")
    assert result.failure is not None
    assert result.failure.length_before > 60
    assert result.failure.world.world_size == 2
    assert length <= 2 * minimal


def test_a_script_skips_what_is_not_enabled_and_comes_to_an_end() -> None:
    played = replay(SMALL, 0)
    world, start = played.setting.world, played.setting.start
    whole = Script(world, start.stop_after, played.actions).play()
    assert tuple(whole.performed) == played.actions
    meetings = tuple(a for a in played.actions if isinstance(a, Exchange | Gradient))
    again = Script(world, start.stop_after, meetings[::-1]).play()
    assert again.broken is None
    assert not any(actions(world, again.state._replace(faults=0, stops=0)))
