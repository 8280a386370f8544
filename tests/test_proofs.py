"""Theorems hold for every value, their mutants fall, and the machinery cannot be fooled."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import z3
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from model_check import paths as paths_module
from model_check.paths import Engine
from model_check.prover import Obligation, Proof, Prover, Source, both, either, implies
from model_check.symbolic import NeedsConcrete, SymInt
from odb.cli import app
from odb.verification import theorems as theorems_module
from proofs import agreement, budget, exchange, gradient, quota, splitting, window
from proofs.catalogue import NOT_PROVED, THEOREMS
from proofs.check import CheckedTheorem, check_theorem
from proofs.coverage import COVERAGE
from proofs.document import document
from proofs.reports import lifted
from proofs.second import Condition, ask_cvc5, cvc5_is_there
from spec import alignment, grouping, rank, scaling
from spec import config as config_module
from spec import exchange as spec_exchange
from spec import quota as spec_quota
from spec.config import Budget, Config
from spec.exchange import tally_of
from spec.messages import PostReport
from spec.rank import Setup, start
from tests.strategies import configs, shards
from tests.test_verify import PROMISES

THIS = (__import__("sys").modules[__name__],)
PLAIN = Prover(Engine(THIS, timeout_ms=5000), 5000)


def prove(body: Any, subject: Any = None) -> Any:
    return PLAIN.prove(Obligation("test", "", body, subject))


# ---------------------------------------------------------------- the theorems


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [theorem.promise for theorem, _ in THEOREMS])
def test_a_theorem_is_proved_and_its_mutants_are_refuted(
    name: str, theorems: list[CheckedTheorem]
) -> None:
    (found,) = (row for row in theorems if row.theorem.promise == name)
    for checked in found.checked:
        assert checked.result.proof is Proof.PROVED, (checked.result.obligation.name, checked)
        assert checked.mutants, checked.result.obligation.name
        for mutant, refuted in checked.mutants.items():
            assert refuted.proof is Proof.REFUTED, (checked.result.obligation.name, mutant)
            assert refuted.counterexample is not None
    assert found.proof is Proof.PROVED


PATHS = {
    "exchange": 7,
    "step-alignment": 178,
    "target-envelope": 220,
    "alignment-succeeds": 3,
    "partition": 1624,
    "budget": 95,
    "bounded-memory": 125,
    "quota-closure": 15,
    "identity-coverage": 18045,
    "deadlock-freedom": 1938,
    "bounded-termination": 132,
    "bounded-delay": 110,
    "uniform-abort": 356,
    "exact-gradient": 19,
}
"""Pinned, so that a change of the engine or of a function that changes them is noticed."""


@pytest.mark.skipif(not cvc5_is_there(), reason="cvc5 is not installed")
def test_a_second_solver_agrees_on_every_question(theorems: list[CheckedTheorem]) -> None:
    for result in theorems:
        for checked in result.checked:
            assert checked.opinions
            assert all(o.agrees for o in checked.opinions), checked.result.obligation.name


def test_paths_are_as_many_as_they_were(theorems: list[CheckedTheorem]) -> None:
    assert {r.theorem.promise: r.paths for r in theorems} == PATHS


def test_theorems_are_about_the_functions_of_the_loader() -> None:
    assert exchange.SHIPPED.merge is spec_exchange.merge
    assert agreement.SHIPPED.decide is spec_exchange.decide is rank.Rules().decide
    assert agreement.SHIPPED.target is spec_exchange.paper_target is rank.Rules().target
    assert splitting.SHIPPED.half is alignment.half
    assert budget.SHIPPED.place is grouping.place
    assert gradient.SHIPPED.loss_scale is scaling.loss_scale
    assert quota.SHIPPED.advance is spec_quota.advance
    assert window.Filling().fill_target is config_module.fill_target is rank.Rules().fill_target


def test_every_promise_is_proved_or_said_not_to_be() -> None:
    proved = {theorem.promise for theorem, _ in THEOREMS}
    assert proved | set(NOT_PROVED) >= PROMISES
    assert not proved & set(NOT_PROVED)


def test_what_stands_behind_a_promise_exists() -> None:
    assert set(COVERAGE) >= PROMISES
    names = {theorem.promise for theorem, _ in THEOREMS}
    for promise, row in COVERAGE.items():
        assert set(row.proved_by) <= names, promise
        for test in row.tested_by:
            file, _, function = test.partition("::")
            source = (Path(__file__).parent.parent / file).read_text()
            assert f"def {function}(" in source, test


# ---------------------------------------------------------------- what theorems assume


@settings(max_examples=150, deadline=None)
@given(configs(), st.data())
def test_sound_ranks_post_the_reports_that_theorems_assume(
    config: Config, data: st.DataObject
) -> None:
    """`proofs.reports.some_report` says what a sound rank posts; here is what it does post."""
    from spec.lockstep import run_epoch

    ranks = data.draw(st.lists(shards(extras=len(config.budget.extras)), min_size=1, max_size=3))
    for record in run_epoch(config, ranks).ranks:
        for groups in record.formed:
            held = sum(map(len, groups))
            assert len(groups) <= held <= config.window
            assert all(groups)
    state, commands = start(Setup(Config(Budget(8), window=4), 0, 1), 0)
    assert not any(isinstance(c, PostReport) for c in commands)
    assert state.arrived == 0


@given(st.integers(0, 3), st.integers(1, 9), st.booleans(), st.booleans(), st.integers(0, 4))
def test_the_lifted_report_of_the_proofs_is_tally_of(
    want: int, limit: int, has_spare: bool, waiting: bool, seat: int
) -> None:
    terms = agreement.some_terms(Source({}), "t")
    report = spec_exchange.Report(terms, want, limit, has_spare, waiting, False, False)
    assert lifted(report, seat, 5) == tally_of(report, seat, 5)
    other = report._replace(failed=has_spare, closed=want == 0)
    assert lifted(other, seat, 5) == tally_of(other, seat, 5)


# ---------------------------------------------------------------- the prover is honest


def test_a_false_claim_is_refuted_with_values_that_show_it() -> None:
    def body(source: Source, _: Any) -> Any:
        x, y = source.int("x"), source.int("y")
        source.assume(both(x >= 0, y >= 0))
        return lambda: x + y != 7

    found = prove(body)
    assert found.proof is Proof.REFUTED
    assert found.counterexample is not None
    assert sum(found.counterexample.values()) == 7


def test_contradictory_assumptions_prove_nothing() -> None:
    def body(source: Source, _: Any) -> Any:
        x = source.int("x")
        source.assume(x > 1)
        source.assume(x < 1)
        return lambda: False

    found = prove(body)
    assert found.proof is Proof.UNKNOWN
    assert "contradict" in found.why


def test_an_error_on_some_path_is_a_counterexample() -> None:
    def body(source: Source, _: Any) -> Any:
        x = source.int("x")

        def claim() -> bool:
            if x == 41:
                raise ValueError("not this one")
            return True

        return claim

    found = prove(body)
    assert (found.proof, found.counterexample) == (Proof.REFUTED, {"x": 41})


def test_too_many_paths_are_unknown() -> None:
    def body(source: Source, _: Any) -> Any:
        values = [source.int(f"x{i}") for i in range(8)]
        return lambda: [bool(v > 0) for v in values] != []

    few = Prover(Engine(THIS, most_paths=20))
    found = few.prove(Obligation("test", "", body, None))
    assert found.proof is Proof.UNKNOWN
    assert "more than 20 paths" in found.why
    assert prove(body).paths == 2**8


def test_a_solver_that_cannot_say_is_unknown() -> None:
    def body(source: Source, _: Any) -> Any:
        x, y, z = (source.int(name) for name in "xyz")
        source.assume(both(x > 2, y > 2, z > 2))
        return lambda: x * x * x + y * y * y != z * z * z

    quick = Prover(Engine(THIS, timeout_ms=200), 200)
    assert quick.prove(Obligation("Fermat", "", body, None)).proof is Proof.UNKNOWN


def test_what_is_not_the_same_twice_is_not_proved() -> None:
    calls: list[int] = []

    def body(source: Source, _: Any) -> Any:
        x = source.int("x")

        def claim() -> bool:
            calls.append(1)
            return bool(x > len(calls)) or True

        return claim

    assert prove(body).proof is not Proof.PROVED


def test_paths_are_merged_for_max_and_min() -> None:
    def body(source: Source, _: Any) -> Any:
        x, y, z = (source.int(name) for name in "xyz")
        return lambda: both(max(x, y, z) >= min(x, y), max(x, y) == max(y, x))

    found = prove(body)
    assert (found.proof, found.paths) == (Proof.PROVED, 1)


def test_what_cannot_be_symbolic_says_what_to_do() -> None:
    x = SymInt(z3.Int("x"))
    for use in (lambda: range(x), lambda: [1, 2][x], lambda: int(x), lambda: x // x):  # type: ignore[call-overload]
        with pytest.raises(NeedsConcrete):
            use()
    with pytest.raises(NeedsConcrete, match="outside"):
        bool(x > 1)
    with pytest.raises(TypeError):
        hash(x)
    with pytest.raises(NeedsConcrete, match="sorted"):
        paths_module.MERGED["sorted"]([x, 1, 2, 3, 4])


def test_engine_signals_pass_through_except_exception() -> None:
    assert not issubclass(NeedsConcrete, Exception)


@given(st.integers(-20, 20), st.integers(1, 7))
def test_symbolic_division_rounds_as_python_does(a: int, b: int) -> None:
    solver = z3.Solver()
    x = z3.Int("x")
    solver.add(x == a, (SymInt(x) // b).term == a // b, (SymInt(x) % b).term == a % b)
    assert solver.check() == z3.sat


def test_helpers_work_on_plain_values_too() -> None:
    assert both(True, True)
    assert not both(True, False)
    assert either(False, True)
    assert implies(False, False)
    assert not implies(True, False)


@pytest.mark.skipif(not cvc5_is_there(), reason="cvc5 is not installed")
def test_a_solver_that_disagrees_is_noticed() -> None:
    wrong = Condition("wrong", "(declare-fun x () Int)\n(assert (> x 0))\n(check-sat)\n", "unsat")
    opinion = ask_cvc5(wrong)
    assert (opinion.answer, opinion.agrees) == ("sat", False)
    theorem, module = THEOREMS[0]
    one = dataclasses.replace(theorem, obligations=theorem.obligations[:1])
    found = check_theorem(one, module, second=True)
    found.checked[0].opinions.append(opinion)
    assert found.proof is Proof.UNKNOWN


# ---------------------------------------------------------------- the command


def test_the_command_proves_exports_and_explains(
    tmp_path: Path, theorems: list[CheckedTheorem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theorems_module, "check_all", lambda *args, **options: theorems)
    runner = CliRunner()
    report = tmp_path / "p.json"
    result = runner.invoke(
        app, ["verify", "--proofs", "--json", str(report), "--smt", str(tmp_path / "smt")]
    )
    assert result.exit_code == 0, result.output
    data = json.loads(report.read_text())["theorems"]
    assert {row["promise"] for row in data} == set(PATHS)
    assert all(row["verdict"] == "proved" for row in data)
    files = list((tmp_path / "smt").glob("*.smt2"))
    assert len(files) > 100
    assert all("(check-sat)" in file.read_text() for file in files)
    told = runner.invoke(app, ["verify", "--explain", "exact-gradient"]).output
    assert "Left out: Floating-point rounding" in told
    assert (
        "Proved for any number of ranks"
        in runner.invoke(app, ["verify", "--explain", "bounded-memory"]).output
    )
    untold = runner.invoke(app, ["verify", "--explain", "epochs-apart"]).output
    assert "Not proved" in untold


def test_the_document_is_what_the_code_says() -> None:
    """docs/PROOFS.md cannot go stale: `python -m proofs.document` writes it."""
    written = (Path(__file__).parent.parent / "docs" / "PROOFS.md").read_text()
    assert written == document()
