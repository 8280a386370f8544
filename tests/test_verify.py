"""`odb verify`: the shipped protocol holds, variants fall, and nothing unexplored is success."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from model_check.explorer import Limits, Verdict, Violation
from model_check.goals import GOALS
from model_check.mutants import judge
from model_check.profiles import for_mutants, full, quick
from model_check.prover import Proof
from model_check.verify import Watcher, by_promise, statements, verify, verify_in_parallel
from odb.cli import app
from odb.errors import ConfigError
from odb.verification import run as run_module
from odb.verification.run import Request
from proofs.catalogue import THEOREMS
from proofs.check import CheckedTheorem
from spec import rank, system
from spec.variants import VARIANTS
from spec.variants.catalogue import PUBLISHED
from spec.world import FAITHFUL, SHIPPED, World

PROMISES = {
    "step-alignment",
    "deadlock-freedom",
    "bounded-termination",
    "identity-coverage",
    "quota-closure",
    "budget",
    "bounded-memory",
    "bounded-delay",
    "uniform-abort",
    "exact-gradient",
    "epochs-apart",
}


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", *args])
    return result.exit_code, result.output


# ---------------------------------------------------------------- the protocol holds


@pytest.mark.timeout(280)
def test_the_quick_profile_holds_and_reaches_every_goal() -> None:
    result = verify_in_parallel(quick(), frozenset(GOALS), Limits(), Watcher(), jobs=2)
    for row in result.cases:
        assert row.exploration.violation is None, (row.case.name, row.exploration.violation)
    assert result.unmet == []
    assert result.verdict is Verdict.HOLDS
    assert {row.name for row in by_promise(result)} == PROMISES
    assert all(row.verdict is Verdict.HOLDS for row in by_promise(result))
    # Counts are pinned: a change of the protocol or of the search that changes them is noticed.
    assert result.states == QUICK_STATES
    assert result.transitions == QUICK_TRANSITIONS


QUICK_STATES, QUICK_TRANSITIONS = 1_249_220, 2_204_235


def test_the_worlds_are_those_in_which_deadlocks_live() -> None:
    """Queues smaller than a round's steps, all modes, faults, early stops, several epochs."""
    worlds = [case.world for case in quick()]
    assert any(world.queue < world.samples for world in worlds)
    assert {(w.config.mode, w.config.idle, w.config.quota is None) for w in worlds} == {
        (w.config.mode, w.config.idle, w.config.quota is None)
        for w in (case.world for case in full())
    }
    assert max(world.faults.most for world in worlds) == 2
    assert {world.stop.name for world in worlds} == {"NEVER", "TOGETHER", "ALONE"}
    assert {world.world_size for world in worlds} == {1, 2, 3}
    assert {case.world.world_size for case in full()} == {1, 2, 3, 4, 5}


def test_the_closed_system_runs_the_functions_of_the_loader() -> None:
    from odb import interpreter

    assert rank.Rules() == SHIPPED
    assert World.__dataclass_fields__["machine"].default is rank.transition
    assert interpreter.transition is rank.transition
    assert system.start is rank.start is interpreter.start
    assert FAITHFUL.may_begin.__module__ == "spec.world"


# ---------------------------------------------------------------- variants fall


def judged(name: str) -> tuple[bool, Violation | None]:
    """Whether the variant falls as it is said to, and how it falls."""
    result = judge(name, VARIANTS[name], for_mutants())
    return result.as_expected, None if result.fall is None else result.fall.violation


@pytest.fixture(scope="module")
def judgements(spread: Any) -> Any:
    return spread(test_a_variant_falls_by_the_promise_that_guards_against_it.__name__, judged)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_falls_by_the_promise_that_guards_against_it(name: str, judgements: Any) -> None:
    as_expected, violation = judgements[name].result()
    assert violation is not None, "it survived"
    assert as_expected, violation


def test_there_are_enough_variants_and_every_promise_is_needed() -> None:
    assert len(VARIANTS) - len(PUBLISHED) >= 25
    assert len(PUBLISHED) == 5
    named = {promise for variant in VARIANTS.values() for promise in variant.falls}
    assert named == PROMISES


def test_counterexamples_are_minimal_and_the_same_every_time() -> None:
    first, second = (
        judge("target-ignores-smallest", VARIANTS["target-ignores-smallest"], for_mutants())
        for _ in range(2)
    )
    assert first.fall is not None
    assert second.fall is not None
    assert first.fall.violation == second.fall.violation
    # Two samples that need a step each, one on the other rank, both inputs at their end, a report.
    assert len(first.fall.violation.actions) == 6


# ---------------------------------------------------------------- honest verdicts


def test_a_limit_that_is_hit_is_unknown() -> None:
    result = verify(quick()[:1], limits=Limits(states=100))
    assert result.verdict is Verdict.UNKNOWN
    assert all(row.verdict is Verdict.UNKNOWN for row in by_promise(result))
    code, output = run("--max-states", "100", "--mode", "quota", "--no-faults")
    assert code == 1
    assert "UNKNOWN" in output


def test_a_goal_that_nothing_reaches_fails() -> None:
    result = verify(for_mutants()[:1], frozenset({"peer lost"}))
    assert result.unmet == ["peer lost"]
    assert result.verdict is Verdict.REFUTED


def test_no_cases_prove_nothing() -> None:
    assert verify([]).verdict is Verdict.UNKNOWN


# ---------------------------------------------------------------- the command


def test_bounds_of_one_s_own(tmp_path: Path) -> None:
    report, junit = tmp_path / "r.json", tmp_path / "r.xml"
    code, output = run(
        "--window", "2", "--budget", "8", "--costs", "1,3,9", "--mode", "quota", "--quota", "2",
        "--json", str(report), "--junit", str(junit),
    )  # fmt: skip
    assert code == 0, output
    data = json.loads(report.read_text())
    assert data["verdict"] == "holds"
    assert [world["ranks"] for world in data["worlds"]] == [2]
    assert {promise["name"] for promise in data["promises"]} == PROMISES
    suites = ET.parse(junit).getroot()
    assert {suite.get("name") for suite in suites} == {"promises", "worlds", "goals"}
    assert all(suite.get("failures") == "0" for suite in suites)


def test_a_whole_profile_reports_its_theorems_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theorems: list[CheckedTheorem]
) -> None:
    """A proof that fails must not exit with 1 beside files in which everything is well."""
    monkeypatch.setitem(run_module.PROFILES, "quick", lambda: for_mutants()[:1])
    monkeypatch.setattr(run_module, "GOALS", {"finished epoch": None})
    monkeypatch.setattr("odb.verification.theorems.check_all", lambda *a, **options: theorems)
    report, junit = tmp_path / "r.json", tmp_path / "r.xml"
    code, output = run("--json", str(report), "--junit", str(junit))
    assert code == 0, output
    proved = {row["promise"] for row in json.loads(report.read_text())["theorems"]}
    (suite,) = ET.parse(junit).getroot().findall("testsuite[@name='theorems']")
    assert {case.get("name") for case in suite} == proved == {t.promise for t, _ in THEOREMS}

    def unproved(self: CheckedTheorem) -> Proof:
        return Proof.UNKNOWN

    monkeypatch.setattr(CheckedTheorem, "proof", property(unproved))
    code, output = run("--junit", str(junit))
    assert code == 1
    (suite,) = ET.parse(junit).getroot().findall("testsuite[@name='theorems']")
    assert suite.get("failures") == suite.get("tests") != "0"


def test_json_on_stdout_is_nothing_but_json() -> None:
    result = CliRunner().invoke(
        app, ["verify", "--samples", "1", "--mode", "join-pad", "--json", "-"]
    )
    assert json.loads(result.stdout)["verdict"] == "holds"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--profile", "huge"], "quick, full"),
        (["--mode", "train"], "join-pad"),
        (["--costs", "a,b"], "1,3,9"),
        (["--costs", "1,1"], "different"),
        (["--ranks", "0"], "ranks must be at least 1"),
        (["--explain", "luck"], "deadlock-freedom"),
    ],
)
def test_bad_arguments_say_what_to_pass(args: list[str], says: str) -> None:
    code, output = run(*args)
    assert code == 2
    assert says in output


def test_a_simulation_is_a_sample_and_says_so(tmp_path: Path) -> None:
    report = tmp_path / "s.json"
    args = ("--simulate", "--ranks", "16", "--seed", "7", "--minutes", "0.05")
    code, output = run(*args, "--json", str(report))
    assert code == 0, output
    assert "not all there are" in output
    data = json.loads(report.read_text())
    assert (data["verdict"], data["ranks"], data["failure"]) == ("unknown", 16, None)
    assert data["runs"] > 0


def test_a_simulation_refuses_what_it_draws_itself() -> None:
    assert run("--simulate", "--quota", "3")[0] == 2


@pytest.mark.parametrize("name", sorted(PROMISES))
def test_every_promise_is_explained(name: str) -> None:
    code, output = run("--explain", name)
    assert code == 0
    assert output.startswith(f"{name}: ")
    assert len(statements()[name]) > 40


def test_requests_are_checked_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="profile"):
        Request(profile="none")


def test_the_command_line_starts_without_the_checker() -> None:
    """`import odb` and `odb --help` must work without the verify extra."""
    code = "import sys, odb, odb.cli; print(sorted({'model_check', 'networkx'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"
