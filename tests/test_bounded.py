"""Whole epochs for all costs and budgets: the shipped protocol keeps its promises, and Z3 finds the
variants that the explorer finds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from model_check.bounded import (
    PROVER,
    Scope,
    _epoch,
    check,
    comparable,
    compare,
    obligation,
    plain_cases,
    scopes,
)
from model_check.paths import Engine
from model_check.prover import Proof, Prover, Source
from odb.cli import app
from odb.verification import bounded as bounded_module
from spec import lockstep
from spec.config import Mode
from spec.lockstep import OutOfStepError, Play, run_epoch
from spec.rank import Rules
from spec.samples import Sample
from spec.variants import VARIANTS, rules
from spec.world import FAITHFUL


@pytest.mark.parametrize("scope", scopes(), ids=lambda s: f"{s.ranks}x{s.samples} {s.name}")
def test_every_promise_holds_for_all_costs_and_budgets(scope: Scope) -> None:
    found = check(scope)
    assert found.proof is Proof.PROVED, (found.why, found.broken, found.counterexample)
    assert found.paths > 8


@pytest.fixture(scope="module")
def compared(spread: Any) -> Any:
    return spread(test_z3_and_the_explorer_agree_on_which_variants_fall.__name__, compare)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", comparable())
def test_z3_and_the_explorer_agree_on_which_variants_fall(name: str, compared: Any) -> None:
    row = compared[name].result()
    assert row.agree, (row.found, row.explorer)
    if row.found is not None:
        assert row.found.counterexample is not None
        assert not any(part.startswith("raises") for part in row.found.broken), row.found.broken


def test_what_is_compared_is_said() -> None:
    assert len(comparable()) > 35
    assert {name for name, v in VARIANTS.items() if v.habits != FAITHFUL} == set(VARIANTS) - set(
        comparable()
    )
    assert len(plain_cases()) > 8


def test_a_counterexample_is_a_real_epoch() -> None:
    """Its numbers, put into plain samples, break the same promise."""
    row = compare("carry-dropped")
    assert row.found is not None
    assert row.scope is not None
    assert row.found.broken == ("identity-coverage",)
    values = row.found.counterexample
    assert values is not None
    play = Play(VARIANTS["carry-dropped"].rules)
    parts = _epoch(Source(values), replace(row.scope, play=play))()
    assert parts.broken == ("identity-coverage",)


def test_a_limit_is_unknown() -> None:
    few = Prover(Engine(PROVER.engine.modules, most_paths=10))
    assert few.prove(obligation(Scope(2, 2, 2, Mode.JOIN))).proof is Proof.UNKNOWN


def test_ranks_that_fall_out_of_step_say_so() -> None:
    from model_check.profiles import JOIN_PAD

    shards = [[Sample(0, 1, 1), Sample(1, 1, 1)], [Sample(0, 5, 5), Sample(1, 5, 5)]]
    with pytest.raises(OutOfStepError, match="different numbers of steps"):
        run_epoch(JOIN_PAD, shards, Play(Rules(align=rules.do_not_split)))
    with pytest.raises(OutOfStepError, match="has not ended after 1 rounds"):
        run_epoch(JOIN_PAD, [[Sample(i, 5, 5) for i in range(3)]], Play(rounds=1))
    assert run_epoch(JOIN_PAD, shards, lockstep.SHIPPED).rounds == 2


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_module, "SMALL", ((2, 1, 1),))
    monkeypatch.setattr(
        bounded_module, "comparable", lambda: {"split-drops-one": VARIANTS["split-drops-one"]}
    )
    report = tmp_path / "b.json"
    result = CliRunner().invoke(
        app, ["verify", "--bounded", "--mutants", "--json", str(report), "--jobs", "2"]
    )
    assert result.exit_code == 0, result.output
    data = json.loads(report.read_text())
    assert data["verdict"] == "proved"
    assert [row["verdict"] for row in data["scopes"]] == ["proved"] * 4
    (row,) = data["variants"]
    assert (row["z3"], row["explorer"]) == (["identity-coverage"], "identity-coverage")
