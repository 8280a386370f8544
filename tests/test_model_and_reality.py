"""Model and reality agree: runs of the closed system are followed by the real loader, step by step,
and protocols that fall in the model fall in the real loader by the same run."""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

import odb
from model_check.mutants import MutantResult, judge
from model_check.profiles import JOIN_PAD, JOIN_STOP, LONG, MODE_NAMES, SHORT, for_mutants
from model_check.simulate import SimulationOptions, replay
from odb import ODBDataLoader
from odb.cli import app
from odb.errors import ConfigError
from odb.outbox import Outbox
from odb.parts import parts
from odb.testing.staged import NotReachedError, StagedJob
from odb.testing.variants import COUNTERPARTS, NO_COUNTERPART, parts_of, protocol
from odb.verification import run as run_module
from odb.verification.differences import (
    PARTING_VARIANTS,
)
from odb.verification.reality import RealFall, follow, replay_fall
from spec.system import initial_states
from spec.variants import VARIANTS, Variant
from spec.world import (
    Action,
    Crash,
    Deliver,
    EndInput,
    Exchange,
    FailBatch,
    Faults,
    Habits,
    HearOfFailure,
    LosePeer,
    PutStep,
    Receive,
    SeeEnd,
    TakeStep,
    World,
)

# ---------------------------------------------------------------- the shipped protocol is followed

RUNS = 60
"""For each mode and number of ranks: with up to three faults, and with stops, in half a minute on a
busy machine."""


@lru_cache
def followed(mode: str, ranks: int) -> Counter[str]:
    """The kinds of actions that the real loader performed in random runs, as the model does."""
    kinds: Counter[str] = Counter()
    options = SimulationOptions(
        ranks=ranks, samples=4, window=4, queue=2, faults=3, mode=mode, seed=2, runs=RUNS
    )
    for run in range(RUNS):
        played = replay(options, run)
        assert played.promise is None
        world, start = played.setting.world, played.setting.start
        result = follow(world, start, played.actions)
        assert result.broken is None, (run, result.broken)
        assert result.exactly, (run, str(result.difference))
        kinds.update(type(action).__name__ for action in played.actions[: result.actions])
    return kinds


@pytest.mark.parametrize("mode", MODE_NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_real_loader_follows_random_runs_of_the_model(mode: str, ranks: int) -> None:
    """After every action of a run, with faults and stops, the state of every rank and of its
    surroundings is the model's."""
    assert followed(mode, ranks).total() > RUNS


def test_everything_that_can_happen_has_happened_in_these_runs() -> None:
    kinds: Counter[str] = Counter()
    for mode in MODE_NAMES:
        for ranks in (1, 2, 3):
            kinds.update(followed(mode, ranks))
    assert set(kinds) == {kind.__name__ for kind in Action.__args__}


def follow_in(world: World, *run: Action) -> bool:
    result = follow(world, next(iter(initial_states(world))), run)
    assert result.actions == len(run)
    return result.exactly


REPORTS, COUNTS, SPARE = Exchange("PostReport"), Exchange("PostCounts"), Exchange("ShareSpare")


def test_a_peer_that_dies_while_ranks_tell_why_one_failed() -> None:
    """A step whose gradient could not complete is dropped."""
    assert follow_in(
        World(JOIN_PAD, 2, (SHORT, LONG), 2, faults=Faults(2)),
        *(Deliver(0, 1, 1), EndInput(0), EndInput(1), REPORTS, Receive(0), Receive(1), SPARE),
        *(COUNTS, Receive(0), PutStep(0), Receive(1), FailBatch(1), REPORTS, Receive(0)),
        *(Crash(1), LosePeer(0)),
    )


def test_a_peer_that_dies_when_a_retired_trainer_has_steps_to_take() -> None:
    """The steps are dropped, and the trainer is told."""
    assert follow_in(
        World(JOIN_STOP, 2, (LONG,), 2, faults=Faults(1)),
        *(Deliver(0, 2, 2), EndInput(0), Deliver(1, 2, 2), Deliver(1, 2, 2), REPORTS, Receive(0)),
        *(Receive(1), COUNTS, Receive(0), PutStep(0), Receive(1), PutStep(1), EndInput(1)),
        *(REPORTS, Receive(0), Crash(1), LosePeer(0), SeeEnd(0)),
    )


def test_a_retired_trainer_hears_of_a_loss_when_it_asks_for_the_next_epoch() -> None:
    """It has seen the end of its own epoch, which failed behind its back (uniform-abort)."""
    world = World(JOIN_STOP, 2, (LONG,), 2, epochs=2, coupled=False, faults=Faults(1))
    assert follow_in(
        world,
        *(EndInput(0), Deliver(1, 2, 2), EndInput(1), REPORTS, Receive(0), Receive(1)),
        *(Crash(1), SeeEnd(0), LosePeer(0), HearOfFailure(0)),
    )


def test_an_error_that_cuts_an_outbox_short_says_behind_which_step() -> None:
    """(`odb chaos --seed 1 --run 119` had a rank with 2 steps whose error said 3.)"""
    outbox: Outbox[int] = Outbox(4)
    for item in range(3):
        outbox.put(item)
    assert [outbox.take(), outbox.take()] == [0, 1]
    lost = odb.PeerLostError(rank=1, step=3, reason="it ended")
    assert outbox.fail(lost.before) == [2]
    assert outbox.look().cut
    with pytest.raises(odb.PeerLostError) as caught:
        outbox.take()
    assert (caught.value.rank, caught.value.step, caught.value.reason) == (1, 2, "it ended")


def test_an_outbox_keeps_the_error_that_its_consumer_could_not_be_given() -> None:
    outbox: Outbox[int] = Outbox(1)
    outbox.finish()
    assert outbox.take() is None
    assert outbox.fail(lambda step: RuntimeError("a peer is lost")) == []
    assert outbox.unheard is None  # the epoch may have been through
    error = RuntimeError("so the epoch has failed")
    assert not outbox.finish(error)
    assert outbox.unheard is error


# ---------------------------------------------------------------- variants fall

LATE = dict.fromkeys(
    ("carry-keeps-largest", "carry-keeps-youngest", "longer-window"), "window 2, 3 samples"
)
"""Variants that fall in a late one of the worlds: it takes long to explore all before it."""


@lru_cache
def judged(name: str) -> MutantResult:
    cases = [case for case in for_mutants() if case.name == LATE.get(name, case.name)]
    return judge(name, VARIANTS[name], cases)


@lru_cache
def real(name: str) -> RealFall:
    return replay_fall(judged(name))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_that_falls_in_the_model_falls_in_the_real_loader(name: str) -> None:
    if name in NO_COUNTERPART:
        with pytest.raises(ConfigError):
            parts_of(VARIANTS[name])
        return
    fell = real(name)
    assert fell.promise == fell.expected, (fell.text, str(fell.difference))
    assert (fell.difference is None) == (name not in PARTING_VARIANTS), str(fell.difference)
    assert fell.as_expected


def test_the_tables_of_exceptions_are_short_and_name_variants() -> None:
    assert len(NO_COUNTERPART) + len(PARTING_VARIANTS) <= 3
    assert {*NO_COUNTERPART, *PARTING_VARIANTS} <= set(VARIANTS)


def test_every_changed_habit_has_a_counterpart_in_the_loader() -> None:
    unknown = Variant("", (), habits=Habits(finish_queue=lambda node: node))
    with pytest.raises(ConfigError, match="corresponds"):
        parts_of(unknown)
    with_habits = [v for v in VARIANTS.values() if v.habits != Habits()]
    assert len(with_habits) >= len(COUNTERPARTS) == 6


def test_lost_samples_are_missing_for_the_user_too() -> None:
    """Not only in the state machine: the trainer does not get them and no list names them, or they
    come twice, or an epoch that left some calls itself complete."""
    signs = ("without a word", "came twice", "calls itself complete", "KeyError")
    for name in VARIANTS:
        if judged(name).fall and real(name).promise == "identity-coverage":
            assert any(sign in line for line in real(name).outward for sign in signs), name


def test_a_deadlock_is_told_by_who_waits_where() -> None:
    standstill = real("slot-not-released").standstill
    assert standstill is not None
    assert standstill.deadlock
    assert {entry.who for entry in standstill.waiting} == {
        f"rank {rank} {who}" for rank in (0, 1) for who in ("trainer", "driver")
    }
    assert any("in put" in entry.where for entry in standstill.waiting)
    assert all("File" in entry.stack for entry in standstill.waiting)


# ---------------------------------------------------------------- the tools themselves


def test_a_changed_protocol_is_plugged_into_an_ordinary_loader_and_out_again() -> None:
    def delivered() -> list[int]:
        loader = ODBDataLoader(
            [[0] * n for n in (1, 2, 3)], token_budget=3, group=None, collate_fn=len, window=3
        )
        return [info.local_samples for _, info in loader.steps()]

    shipped = parts()
    assert sum(delivered()) == 3
    with protocol(VARIANTS["last-group-dropped"]):
        assert sum(delivered()) < 3
    assert sum(delivered()) == 3
    assert parts() is shipped


def test_a_rank_that_does_not_get_there_is_told_with_its_stack() -> None:
    world = World(JOIN_PAD, 2, (SHORT,), 1)
    with StagedJob(world, patience=0.2) as job:
        with pytest.raises(NotReachedError, match="in take"):
            job.perform(TakeStep(0))
        with pytest.raises(NotReachedError, match="not all drivers are in an exchange"):
            job.perform(REPORTS)


def test_ranks_that_are_through_do_not_wait() -> None:
    world = World(JOIN_PAD, 2, (SHORT,), 1)
    run = (EndInput(0), EndInput(1), REPORTS, Receive(0), Receive(1), SeeEnd(0), SeeEnd(1))
    with StagedJob(world) as job:
        for action in run:
            job.perform(action)
        standstill = job.let_go()
        assert not standstill.deadlock
        assert str(standstill) == "all ranks are through"


@pytest.mark.parametrize(
    "name", ["last-group-dropped", "steps-reversed", "carry-dropped", "steps-after-loss"]
)
def test_a_changed_loader_does_not_follow_the_shipped_model(name: str) -> None:
    """The comparison is not empty: it tells where they part, with both states."""
    options = SimulationOptions(ranks=2, samples=4, window=4, faults=3, mode="join-pad", runs=RUNS)
    for run in range(RUNS):
        played = replay(options, run)
        with protocol(VARIANTS[name]):
            result = follow(played.setting.world, played.setting.start, played.actions)
        if not result.exactly:
            assert result.difference is not None
            assert ": really " in str(result.difference)
            assert ", in the model " in str(result.difference)
            return
    pytest.fail("no run shows a difference")


def test_the_command_line_judges_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = {name: VARIANTS[name] for name in ("carry-dropped", "idle-skips-counts")}
    monkeypatch.setattr(run_module, "VARIANTS", few)
    report, junit = tmp_path / "r.json", tmp_path / "r.xml"
    args = ["verify", "--mutants", "--real", "--json", str(report), "--junit", str(junit)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    rows = json.loads(report.read_text())["in_the_real_loader"]
    assert {row["name"]: row["promise"] for row in rows} == {
        "carry-dropped": "identity-coverage",
        "idle-skips-counts": "deadlock-freedom",
    }
    assert [row["difference"] is None for row in rows] == [True, False]
    assert all(row["fell"] for row in rows)
    assert "variants in the real loader" in junit.read_text()
