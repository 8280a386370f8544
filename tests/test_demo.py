"""`odb demo`: its corpus, its rules, its accounting, and one small run on two real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import odb
from odb.demo import DemoOptions
from odb.demo.accounting import account
from odb.demo.corpus import (
    FunctionDataset,
    choose_split,
    extract_functions,
    standard_library,
    train_tokenizer,
)
from odb.demo.model import CausalTransformer, ModelSize
from odb.demo.records import Checkpoint, RankRecord, StepRecord, Way
from odb.demo.results import WayResult, merge
from odb.demo.training import learning_rate
from odb.demo.verification import Verification, check_run
from odb.demo.ways import largest_safe_batch_size, steps_per_update

SMALL_RUN_S = 150


@pytest.fixture(scope="module")
def json_package() -> Path:
    return standard_library() / "json"


class TestCorpus:
    def test_extraction_is_deterministic_and_each_text_comes_once(self, json_package: Path) -> None:
        functions = extract_functions(json_package)
        assert functions == extract_functions(json_package)
        assert len(functions) == len(set(functions)) > 10
        assert all(f.lstrip().startswith(("def ", "async def ")) for f in functions)

    def test_an_inner_function_is_left_to_the_outer_one(self, tmp_path: Path) -> None:
        source = "class A:\n    def outer(self):\n        def inner(): pass\n        return inner\n"
        (tmp_path / "a.py").write_text(source)
        (tmp_path / "broken.py").write_text("def f(:\n")
        (tmp_path / "tests").mkdir()
        (tmp_path / "tests" / "b.py").write_text("def skipped(): pass\n")
        assert extract_functions(tmp_path) == (
            "    def outer(self):\n        def inner(): pass\n        return inner",
        )

    def test_split_is_chosen_by_the_seed_and_does_not_overlap(self) -> None:
        functions = [f"def f{i}(): pass" for i in range(100)]
        split = choose_split(functions, 60, 10, seed=3)
        assert split == choose_split(functions, 60, 10, seed=3)
        assert split != choose_split(functions, 60, 10, seed=4)
        assert (len(split.train), len(split.held_out)) == (60, 10)
        assert not set(split.train) & set(split.held_out)

    def test_too_few_functions_is_an_error(self) -> None:
        with pytest.raises(odb.ConfigError, match="only 3"):
            choose_split(["a", "b", "c"], 3, 1, seed=0)

    def test_the_long_tail_is_kept_up_to_the_maximum(self, json_package: Path) -> None:
        functions = extract_functions(json_package)
        tokenizer = train_tokenizer(functions)
        whole = FunctionDataset(functions, tokenizer, max_length=100_000)
        cut = FunctionDataset(functions, tokenizer, max_length=64)
        lengths = [whole.length(i) for i in range(len(whole))]
        assert max(lengths) > 3 * sorted(lengths)[len(lengths) // 2]
        assert [cut.length(i) for i in range(len(cut))] == [min(n, 64) for n in lengths]
        sample = cut[lengths.index(max(lengths))]
        assert sample["input_ids"].shape == sample["labels"].shape == (64,)


class TestRules:
    @pytest.mark.parametrize(
        ("budget", "longest", "size"), [(4096, 1024, 4), (4096, 1025, 3), (100, 4096, 1)]
    )
    def test_fixed_batch_size_is_safe_at_the_longest_sequence(
        self, budget: int, longest: int, size: int
    ) -> None:
        assert largest_safe_batch_size(budget, longest) == size

    def test_updates_of_the_fixed_ways_hold_about_as_many_samples_as_a_step_of_odb(self) -> None:
        assert steps_per_update(22.4, 4) == 6
        assert steps_per_update(1.0, 4) == 1

    def test_learning_rate_warms_up_and_falls(self) -> None:
        rates = [learning_rate(share / 100) for share in range(101)]
        top = rates.index(max(rates))
        assert rates[:top] == sorted(rates[:top])
        assert rates[top:] == sorted(rates[top:], reverse=True)
        assert 0 < rates[-1] < rates[top] / 5

    @pytest.mark.parametrize(
        "wrong", [{"ranks": 0}, {"budget": 100}, {"samples": 20}, {"accumulate": 0}]
    )
    def test_options_that_cannot_work_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(odb.ConfigError):
            DemoOptions(**wrong)


class TestModel:
    def test_padding_does_not_change_the_loss(self) -> None:
        torch.manual_seed(0)
        model = CausalTransformer(ModelSize(vocabulary=50, width=16, heads=2, layers=2))
        model.requires_grad_(False)
        rows = [torch.randint(0, 50, (n,)) for n in (3, 9, 14)]
        batch = odb.PadCollate()([{"input_ids": row, "labels": row} for row in rows])
        alone = [float(model(row[None], row[None])) for row in rows]
        weights = [len(row) - 1 for row in rows]
        expected = sum(a * w for a, w in zip(alone, weights, strict=True)) / sum(weights)
        assert float(model(**batch)) == pytest.approx(expected, rel=1e-5)

    def test_no_position_sees_a_later_one(self) -> None:
        model = CausalTransformer(ModelSize(vocabulary=50, width=16, heads=2, layers=2))
        model.requires_grad_(False)
        tokens = torch.randint(0, 50, (1, 8))
        changed = tokens.clone()
        changed[0, -1] = (changed[0, -1] + 1) % 50
        labels = tokens.clone()
        labels[0, -1] = -100
        assert float(model(tokens, labels)) == pytest.approx(float(model(changed, labels)))


class TestAccounting:
    """Promise: identity-coverage, as the demo checks it."""

    def test_each_sample_once_in_each_epoch(self) -> None:
        found = account(3, 2, [(e, s) for e in (0, 1) for s in (2, 0, 1)])
        assert found.exactly_once
        assert str(found) == "yes"
        assert found.delivered == 6

    def test_a_lost_and_a_doubled_sample_are_found_though_the_count_is_right(self) -> None:
        found = account(3, 1, [(0, 0), (0, 1), (0, 1)])
        assert not found.exactly_once
        assert found.missing == ((0, 2),)
        assert found.repeated == ((0, 1),)
        assert str(found) == "no (1 missing, 1 repeated)"

    def test_a_sample_in_the_wrong_epoch_is_found(self) -> None:
        found = account(2, 2, [(0, 0), (0, 1), (0, 0), (1, 1)])
        assert found.missing == ((1, 0),)
        assert found.repeated == ((0, 0),)

    def test_a_sample_that_does_not_exist_is_found(self) -> None:
        assert account(1, 1, [(0, 0), (0, 7)]).unknown == ((0, 7),)


class TestVerification:
    """Each promise that the demo checks on its run is refuted by records that break it."""

    def test_a_correct_run_holds(self) -> None:
        checked = check_run(result_of([[(0, 1)], [(2, 3)]]), budget=20)
        assert [c.promise for c in checked] == ["step-alignment", "identity-coverage", "budget"]
        assert all(c.holds for c in checked)

    @pytest.mark.parametrize(
        ("batches", "budget", "promise"),
        [
            ([[(0, 1), (3,)], [(2,)]], 20, "step-alignment"),
            ([[(0, 1)], [(2, 2)]], 20, "identity-coverage"),
            ([[(0, 1)], [(2, 3)]], 19, "budget"),
        ],
    )
    def test_a_broken_promise_is_named(
        self, batches: list[list[tuple[int, ...]]], budget: int, promise: str
    ) -> None:
        checked = check_run(result_of(batches), budget)
        assert [c.promise for c in checked if not c.holds] == [promise]
        verification = Verification(checked, None, None)
        assert not verification.holds
        assert verification.lines()[0].startswith(f"BROKEN in this run: {promise}")

    def test_a_sample_that_is_too_long_by_itself_does_not_break_the_budget(self) -> None:
        assert all(c.holds for c in check_run(result_of([[(0,)]]), budget=5))

    def test_what_the_model_refutes_is_a_failure_and_what_is_missing_is_said(self) -> None:
        checked = check_run(result_of([[(0,)]]), budget=20)
        assert not Verification(checked, "a counterexample", False).holds
        assert Verification(checked, "all epochs", True).holds
        assert "not checked" in Verification(checked, None, None).lines()[-1]


def test_the_loss_at_a_moment_lies_between_the_checkpoints_around_it() -> None:
    result = result_of([[(0,)]])
    assert result.loss_at(0.0) == pytest.approx(8.0)
    assert result.loss_at(2.5) == pytest.approx(6.0)
    assert result.loss_at(99.0) == pytest.approx(4.0)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("demo")
    arguments = ["--samples", "60", "--max-length", "256", "--budget", "1024", "--epochs", "1"]
    arguments += ["--seed", "1", "--json", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", "from odb.cli import main; main()", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=SMALL_RUN_S,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one object, and nothing else on stdout
    assert isinstance(report, dict)
    return report, out


class TestSmallRun:
    def test_odb_delivers_every_sample_once_in_equal_steps(
        self, small_run: tuple[dict[str, Any], Path]
    ) -> None:
        report, _ = small_run
        way = report["ways"]["odb"]
        assert way["samples_exactly_once"]
        assert way["steps_equal"]
        assert len(set(way["steps_per_rank"])) == 1
        assert len(way["steps_per_rank"]) == 2
        assert report["verification"]["holds"]
        assert {c["promise"] for c in report["verification"]["run"]} == {
            "step-alignment",
            "identity-coverage",
            "budget",
        }

    def test_every_way_reports_the_numbers_of_the_table(
        self, small_run: tuple[dict[str, Any], Path]
    ) -> None:
        report, _ = small_run
        assert list(report["ways"]) == ["fixed", "sorted", "odb"]
        for way in report["ways"].values():
            assert way["samples_missing"] == way["samples_unknown"] == 0
            assert way["steps_equal"]
            assert way["samples_per_second"] > 0
            assert way["tokens_per_second"] > 0
            assert 0 <= way["padding"] < 1
            assert way["tokens_per_step"] > 0
            assert way["validation_loss"] < way["curve"][0]["loss"] + 1
            assert len(way["padding_per_step"]) == way["steps"]

    def test_cost_based_batches_hold_less_padding_in_fewer_steps(
        self, small_run: tuple[dict[str, Any], Path]
    ) -> None:
        report, _ = small_run
        fixed, ours = report["ways"]["fixed"], report["ways"]["odb"]
        assert ours["padding"] < fixed["padding"]
        assert ours["steps"] < fixed["steps"]
        # All ways start from the same weights.
        assert ours["curve"][0]["loss"] == pytest.approx(fixed["curve"][0]["loss"])

    def test_plot_and_numbers_are_saved(self, small_run: tuple[dict[str, Any], Path]) -> None:
        report, out = small_run
        assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
        assert json.loads((out / "demo.json").read_text()) == report


def result_of(batches: list[list[tuple[int, ...]]]) -> WayResult:
    """The result of ranks that took these batches, each row of 10 tokens."""
    records = []
    for rank_batches in batches:
        steps = [
            StepRecord(0, i, 1.0, 0.0, len(ids), 10 * len(ids), 10 * len(ids), True, 1.0, ids)
            for i, ids in enumerate(rank_batches)
        ]
        curve = [Checkpoint(0.0, 0, 80.0, 10), Checkpoint(5.0, 10, 40.0, 10)]
        records.append(RankRecord(Way.ODB, 1, 5.0, 0.0, steps, curve))
    ids = {i for rank_batches in batches for batch in rank_batches for i in batch}
    return merge(records, max(ids) + 1, 1)
