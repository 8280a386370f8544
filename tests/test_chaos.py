"""The chaos campaign: a judge that can fail, runs that can be repeated, and a short campaign."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from odb.chaos.draw import Kind, Layout, Scenario, Space, draw
from odb.chaos.job import EpochSeen, ErrorSeen, RankSeen, StepSeen
from odb.chaos.judge import PROMISES, Ending, Observed, Promise, Traced, detection_s, judge
from odb.chaos.report import as_json, replay_command, rows_of
from odb.chaos.run import Result, observe
from odb.cli import app
from odb.testing import FaultPlan, KillRank
from odb.tracing import Verdict

# ---------------------------------------------------------------- fabricated outcomes


def scenario(kind: Kind, **changes: Any) -> Scenario:
    """Three ranks with four samples each; rank 1 has the fault."""
    settings: dict[str, Any] = {
        "run": 0, "kind": kind, "world_size": 3, "victim": 1, "layout": Layout.OWN,
        "shards": ((5, 5, 5, 5),) * 3, "start_method": "fork", "epochs": 1, "pause_s": 0.0,
        "options": {"join": True, "idle": "pad", "quota": None}, "gradient": False,
        "leave_at": None, "plan": FaultPlan(KillRank(1, step=2), must_fire=False),
    }  # fmt: skip
    return Scenario(**{**settings, **changes})


def steps_of(rank: int, count: int = 4) -> list[StepSeen]:
    return [StepSeen(n, n // 2, (rank * 10_000 + n,), 3, False) for n in range(count)]


def complete(**changes: Any) -> Observed:
    """Everything went well."""
    ranks = tuple(RankSeen([EpochSeen(steps_of(rank), complete=True)]) for rank in range(3))
    settings: dict[str, Any] = {
        "ranks": ranks, "failures": {}, "exit_codes": (0, 0, 0), "fired_at": None,
        "traced": Traced(Verdict.CONFORMS),
    }  # fmt: skip
    return Observed(**{**settings, **changes})


def failed(rank: int, name: str, names: int | None = 1, step: int = 2, **more: Any) -> RankSeen:
    """A rank that took two steps, and then had an error."""
    error = ErrorSeen(name, "as the test says", names, step, more.get("missing", ()), True)
    return RankSeen([EpochSeen(steps_of(rank, 2))], error, heard_at=11.0 + rank)


def soft() -> Observed:
    """Rank 1 failed, and all ranks stopped before step 2."""
    ranks = (failed(0, "PeerFailedError"), failed(1, "PipelineError"), failed(2, "PeerFailedError"))
    return complete(ranks=ranks, fired_at=10.0)


def killed() -> Observed:
    """Rank 1 was killed, and the others heard of it at different steps."""
    last = failed(2, "PeerLostError", step=3)
    last.epochs[0].steps.append(steps_of(2)[2])
    return complete(
        ranks=(failed(0, "PeerLostError"), None, last),
        failures={1: "ended without a result, exit code -9"},
        exit_codes=(0, -9, 0), fired_at=10.0, traced=Traced(Verdict.INCOMPLETE),
    )  # fmt: skip


def stuck() -> Observed:
    """Rank 1 never came to the exchange."""
    ranks = tuple(failed(r, "ExchangeTimeoutError", None, missing=(1,)) for r in range(3))
    return complete(ranks=ranks, fired_at=10.0, traced=Traced(Verdict.INCOMPLETE))


GOOD: dict[Kind, Callable[[], Observed]] = {
    Kind.NOTHING: complete,
    Kind.RAISE_IN_BATCH: soft,
    Kind.KILL_RANK: killed,
    Kind.BLOCK_IN_SAMPLE: stuck,
    Kind.STOP_RANK: lambda: complete(fired_at=10.0),
}


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.name)
def test_what_is_promised_is_accepted(kind: Kind) -> None:
    assert judge(scenario(kind), GOOD[kind]()) == ()


def test_every_kind_has_a_promise() -> None:
    assert set(PROMISES) == set(Kind)


# Changes of a good outcome, each of which must be reported, with the words of the report.

Change = Callable[[list[Any]], None]


def in_rank(rank: int, change: Callable[[RankSeen], None]) -> Callable[[Observed], Observed]:
    def edit(observed: Observed) -> Observed:
        ranks = copy.deepcopy(observed.ranks)
        seen = ranks[rank]
        assert seen is not None
        change(seen)
        return complete(**{**vars(observed), "ranks": ranks})

    return edit


def with_(**changes: Any) -> Callable[[Observed], Observed]:
    return lambda observed: complete(**{**vars(observed), **changes})


def other_error(**changes: Any) -> Callable[[RankSeen], None]:
    def change(seen: RankSeen) -> None:
        assert seen.error is not None
        seen.error = seen.error._replace(**changes)

    return change


def take_one_step_more(seen: RankSeen) -> None:
    seen.epochs[0].steps.append(StepSeen(2, 1, (), 3, True))
    other_error(step=3)(seen)


def deliver(name: int) -> Callable[[RankSeen], None]:
    def change(seen: RankSeen) -> None:
        seen.epochs[0].steps[1] = seen.epochs[0].steps[1]._replace(names=(name,))

    return change


def replace_step(**changes: Any) -> Callable[[RankSeen], None]:
    def change(seen: RankSeen) -> None:
        seen.epochs[0].steps[1] = seen.epochs[0].steps[1]._replace(**changes)

    return change


def set_epoch(**changes: Any) -> Callable[[RankSeen], None]:
    return lambda seen: vars(seen.epochs[0]).update(changes)


def hang(rank: int) -> Callable[[Observed], Observed]:
    def edit(observed: Observed) -> Observed:
        ranks = tuple(None if r == rank else seen for r, seen in enumerate(observed.ranks))
        failures = {**observed.failures, rank: "had not returned after 90 s"}
        return complete(**{**vars(observed), "ranks": ranks, "failures": failures})

    return edit


BROKEN: list[tuple[str, Kind, Callable[[Observed], Observed], str]] = [
    ("hang", Kind.NOTHING, hang(2), "rank 2 hangs"),
    ("survivor hangs", Kind.KILL_RANK, hang(0), "rank 0 hangs"),
    ("crash", Kind.NOTHING, with_(failures={0: "boom"}), "rank 0 brought nothing home: boom"),
    ("exit code", Kind.RAISE_IN_BATCH, with_(exit_codes=(0, 0, -6)), "rank 2 returned, and.* -6"),
    ("survives", Kind.KILL_RANK, with_(ranks=soft().ranks), "rank 1 should have ended with killed"),
    ("lost sample", Kind.NOTHING, in_rank(0, replace_step(names=())), "1 samples were lost: .1."),
    ("lost one more", Kind.STOP_RANK, in_rank(2, replace_step(names=())), "lost: .20001."),
    ("duplicate", Kind.NOTHING, in_rank(0, deliver(0)), "more than once: .0."),
    ("duplicate, then error", Kind.RAISE_IN_BATCH, in_rank(0, deliver(0)), "more than once"),
    ("of another", Kind.KILL_RANK, in_rank(0, deliver(20_003)), "samples of others: .20003."),
    ("not there", Kind.KILL_RANK, in_rank(0, deliver(77)), "not there: .77."),
    ("content", Kind.NOTHING, in_rank(1, set_epoch(wrong=2)), "2 samples with wrong content"),
    ("filtered", Kind.NOTHING, in_rank(1, set_epoch(filtered=1)), "1 samples are listed as filter"),
    ("held", Kind.NOTHING, in_rank(1, set_epoch(undelivered=1)), "listed as undelivered"),
    ("no end", Kind.NOTHING, in_rank(1, set_epoch(complete=False)), "not complete on every rank"),
    ("fewer steps", Kind.NOTHING, in_rank(1, set_epoch(steps=steps_of(1, 3))), "took 3 steps"),
    ("other round", Kind.NOTHING, in_rank(2, replace_step(round=1)), "in other rounds"),
    ("other step", Kind.RAISE_IN_BATCH, in_rank(2, take_one_step_more), "at different steps"),
    ("wrong step", Kind.KILL_RANK, in_rank(0, other_error(step=1)), "its error says step 1"),
    ("wrong rank", Kind.RAISE_IN_BATCH, in_rank(2, other_error(rank=0)), "should have named rank"),
    ("no rank", Kind.KILL_RANK, in_rank(0, other_error(rank=None)), "should have named rank 1"),
    ("victim", Kind.RAISE_IN_BATCH, in_rank(1, other_error(rank=0)), "rank 1 should have named"),
    ("missing", Kind.BLOCK_IN_SAMPLE, in_rank(0, other_error(missing=(1, 2))), "should have named"),
    ("error", Kind.KILL_RANK, in_rank(0, other_error(name="MismatchError")), "with PeerLostError,"),
    ("timeout", Kind.KILL_RANK, in_rank(0, other_error(name="ExchangeTimeoutError")), "PeerLost"),
    ("no error", Kind.RAISE_IN_BATCH, with_(ranks=complete().ranks), "rank 0 should have ended"),
    ("needless", Kind.NOTHING, with_(ranks=soft().ranks), "with no error, and ended with Peer"),
    ("did not happen", Kind.RAISE_IN_BATCH, with_(fired_at=None), "should have ended with no err"),
    ("traces", Kind.NOTHING, with_(traced=Traced(Verdict.INCOMPLETE)), "the traces: incomplete"),
    ("diverge", Kind.KILL_RANK, with_(traced=Traced(Verdict.DIVERGES)), "the traces: diverges"),
    (
        "a divergence",
        Kind.KILL_RANK,
        with_(traced=Traced(Verdict.INCOMPLETE, ("line 3",))),
        "line 3",
    ),
]


@pytest.mark.parametrize(("what", "kind", "change", "words"), BROKEN, ids=[b[0] for b in BROKEN])
def test_what_is_not_promised_is_reported(
    what: str, kind: Kind, change: Callable[[Observed], Observed], words: str
) -> None:
    problems = judge(scenario(kind), change(GOOD[kind]()))
    assert any(re.search(words, problem) for problem in problems), problems


def test_a_quota_is_met_at_the_first_step_that_meets_it() -> None:
    def with_quota(quota: int) -> tuple[str, ...]:
        options = {"join": False, "idle": "pad", "quota": quota}
        return judge(scenario(Kind.NOTHING, options=options), complete())

    assert with_quota(12) == with_quota(11) == with_quota(500) == ()
    assert "for a quota of 9" in with_quota(9)[0]


def test_the_table_of_promises_is_what_is_judged_by(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**PROMISES, Kind.STOP_RANK: Promise(Ending.KILLED, Ending.PEER_LOST)}
    monkeypatch.setattr("odb.chaos.judge.PROMISES", changed)
    assert judge(scenario(Kind.STOP_RANK), complete(fired_at=10.0))


# ---------------------------------------------------------------- scenarios and the report


def test_a_run_depends_on_seed_and_number_alone() -> None:
    assert [draw(Space(3), n) for n in range(50)] == [draw(Space(3), n) for n in range(50)]
    assert draw(Space(3), 1) != draw(Space(4), 1)
    assert {draw(Space(3), n).kind for n in range(200)} == set(Kind)
    only = Space(3, ranks=(2,), kinds=(Kind.KILL_RANK,))
    for n in range(50):
        drawn = draw(only, n)
        assert (drawn.world_size, drawn.kind) == (2, Kind.KILL_RANK)
        assert all(fault.rank == drawn.victim < 2 for fault in drawn.plan.faults)
    command = replay_command(only, 17)
    assert command == "odb chaos --seed 3 --run 17 --ranks 2 --faults kill_rank"


def test_the_report_counts_by_kind() -> None:
    broken = in_rank(0, deliver(0))(complete())
    results = [
        Result(scenario(kind), observed, judge(scenario(kind), observed), 1.0)
        for kind, observed in (
            (Kind.NOTHING, complete()), (Kind.NOTHING, broken), (Kind.KILL_RANK, killed()),
        )
    ]  # fmt: skip
    nothing, killing = rows_of(results)
    assert (nothing.runs, nothing.as_promised, nothing.lost, nothing.doubled) == (2, 1, 1, 1)
    assert (killing.fired, killing.as_promised, killing.told_s) == (1, 1, 3.0)
    assert detection_s(killed()) == 3.0
    report = as_json(Space(), results)
    assert report["as_promised"] == 2
    assert report["failures"][0]["again"] == "odb chaos --seed 1 --run 0"
    json.dumps(report)


# ---------------------------------------------------------------- the real thing


def test_a_short_campaign_is_as_promised(tmp_path: Path) -> None:
    """Promises: uniform-abort, step-alignment, identity-coverage, and nobody hangs."""
    file = tmp_path / "chaos.json"
    args = ["chaos", "--runs", "60", "--seed", "2", "--minutes", "0.5", "--jobs", "2"]
    outcome = CliRunner().invoke(app, [*args, "--json", str(file)])
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(file.read_text())
    assert report["runs"] == report["as_promised"] >= 3
    assert report["failures"] == []


def test_a_run_that_hangs_is_found(tmp_path: Path) -> None:
    """With a limit that no run can keep: the harness ends it, and the judge says so."""
    stopped = next(
        drawn
        for n in range(500)
        for drawn in [draw(Space(1, (2,), (Kind.STOP_RANK,)), n)]
        if drawn.start_method == "fork" and "seconds=4.0" in str(drawn.plan)
        and "step=0, " in str(drawn.plan) and "epoch=1" not in str(drawn.plan)
    )  # fmt: skip
    problems = judge(stopped, observe(stopped, tmp_path, limit_s=2.0))
    assert any("hangs" in problem for problem in problems), problems


def test_the_command_repeats_one_run_in_detail() -> None:
    args = ["chaos", "--seed", "1", "--run", "1", "--faults", "raise_in_batch", "--ranks", "2"]
    outcome = CliRunner().invoke(app, args)
    assert outcome.exit_code == 0, outcome.output
    assert re.search(r"rank [01]: steps of its epochs: \d.*PipelineError", outcome.output)
    assert "traces: conforms" in outcome.output


@pytest.mark.parametrize(
    "args",
    [["--ranks", "1"], ["--ranks", "x"], ["--faults", "flood"], ["--runs", "0"], ["--jobs", "0"]],
)
def test_wrong_options_are_explained(args: list[str]) -> None:
    outcome = CliRunner().invoke(app, ["chaos", *args])
    assert outcome.exit_code == 2
    assert "odb chaos: " in outcome.output
