"""`odb bench`: every command runs, counts what it says, and asserts no times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import odb
from odb.bench.data import LengthSpec, SyntheticDataset, draw_lengths
from odb.bench.loader import ARMS, ODB, PLAIN, UNCHUNKED, LoaderBench, bench_loader
from odb.bench.rounds import RoundBench, bench_rounds
from odb.cli.bench import app

pytestmark = pytest.mark.timeout(60)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def as_json(*arguments: object) -> Any:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# ---------------------------------------------------------------- data


def test_lengths_have_the_shape_that_they_were_asked_for() -> None:
    lengths = draw_lengths(LengthSpec())
    assert len(lengths) == 20_000
    assert 290 < lengths.mean() < 305  # a little under 300, as long ones are cut off
    assert 0.9 < lengths.std() / lengths.mean() < 1.05
    assert (lengths.min() >= 1, lengths.max()) == (True, 4096)


def test_lengths_are_the_same_every_time_and_differ_by_seed() -> None:
    first = draw_lengths(LengthSpec(samples=50))
    assert np.array_equal(first, draw_lengths(LengthSpec(samples=50)))
    assert not np.array_equal(first, draw_lengths(LengthSpec(samples=50, seed=1)))


def test_samples_are_as_long_as_their_lengths() -> None:
    dataset = SyntheticDataset(np.array([3, 1]))
    assert len(dataset) == 2
    assert set(dataset[0]) == {"input_ids", "attention_mask", "labels"}
    assert all(len(values) == 3 for values in dataset[0].values())


@pytest.mark.parametrize("bad", [{"samples": 0}, {"mean": -1.0}, {"spread": 0.0}, {"seed": -1}])
def test_impossible_lengths_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(odb.ConfigError):
        LengthSpec(**bad)


# ---------------------------------------------------------------- loader


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 1), (2, 1)])
def test_all_arms_deliver_all_samples(ranks: int, workers: int) -> None:
    """The benchmark itself raises if an arm delivers too few samples or too many."""
    bench = LoaderBench(
        lengths=LengthSpec(samples=400),
        window=128,
        workers=workers,
        ranks=ranks,
        repeats=2,
        timeout=50,
    )
    result = bench_loader(bench)
    assert result.ranks == ranks
    arms = {arm.arm: arm for arm in result.arms}
    assert tuple(arms) == ARMS
    assert arms[PLAIN].ratios == (1, 1)
    assert arms[PLAIN].mean_batch == pytest.approx(8, abs=0.2)
    assert arms[ODB].padding < arms[PLAIN].padding
    assert arms[ODB].mean_batch > 8
    assert all(arm.samples_per_s > 0 for arm in result.arms)


def test_unchunked_really_sends_one_sample_per_message() -> None:
    """The negative arm of the comparison: it would mean nothing if both arms used chunks."""
    from odb.bench.loader import _make_loader
    from odb.sharding import Seat, ShardSampler

    dataset = SyntheticDataset(draw_lengths(LengthSpec(samples=64)))
    sampler = ShardSampler(64, Seat(0, 1), shuffle=False, seed=0)
    chunks = {}
    for arm in (ODB, UNCHUNKED):
        loader = _make_loader(arm, LoaderBench(workers=0), dataset, sampler)
        assert isinstance(loader, odb.ODBDataLoader)
        chunks[arm] = loader._plan.read.chunk
    assert chunks[UNCHUNKED] == 1
    assert chunks[ODB] > 1


def test_loader_command() -> None:
    options = ["--samples", 200, "--window", 64, "--repeats", 1, "--ranks", 1, "--workers", 0]
    content = as_json("loader", *options)
    assert [arm["arm"] for arm in content["results"][0]["arms"]] == list(ARMS)
    assert content["options"]["lengths"]["samples"] == 200
    table = invoke("loader", *options)
    assert table.exit_code == 0
    for text in ("plain", "ratio", "padding", "samples/s"):
        assert text in table.stdout


# ---------------------------------------------------------------- rounds and grouping


def test_a_round_is_measured_on_every_rank() -> None:
    result = bench_rounds(RoundBench(ranks=2, steps=4, rounds=10, warm_up=2, timeout=40))
    assert (result.ranks, result.steps, len(result.all_ms)) == (2, 4, 10)
    assert 0 < result.median_ms <= result.p95_ms


def test_round_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["--ranks", "1,2", "--rounds", 10, "--steps", 3]
    content = as_json("round", *options, "--plot", tmp_path / "round.png")
    assert [r["ranks"] for r in content["results"]] == [1, 2]
    assert (tmp_path / "round.png").read_bytes().startswith(b"\x89PNG")


def test_grouping_command() -> None:
    content = as_json("grouping", "--samples", 500, "--repeats", 2)
    group, split, same, carry = content["results"]
    assert group["groups_out"] == split["groups_in"] == same["groups_out"]
    assert split["groups_out"] == 2 * group["groups_out"]
    assert carry["groups_out"] == group["groups_out"] // 2
    table = invoke("grouping", "--samples", 500, "--repeats", 1)
    assert "align: split" in table.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loader", "--ranks", "1,x"], "--ranks '1,x'"),
        (["loader", "--repeats", "0"], "repeats"),
        (["loader", "--samples", "0"], "0 samples"),
        (["round", "--ranks", "0"], "--ranks '0'"),
        (["round", "--rounds", "1"], "rounds 2 or more"),
        (["grouping", "--repeats", "0"], "repeats must be 1 or more"),
        (["grouping", "--budget", "0"], "token budget must be"),
    ],
)
def test_a_bad_option_ends_with_2_and_a_message(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


# ---------------------------------------------------------------- traces


def test_recording_is_measured_in_pairs_and_the_trace_is_of_the_run() -> None:
    options = ("--samples", 300, "--window", 64, "--workers", 0, "--repeats", 2, "--ranks", "1,2")
    content = as_json("trace", *options)
    assert [result["ranks"] for result in content["results"]] == [1, 2]
    for result in content["results"]:
        assert len(result["ratios"]) == 2
        assert result["samples"] == 300 / result["ranks"]
        assert 0 < result["recording_share"] < 1
        assert 10 < result["bytes"] / result["samples"] < 200
    assert "recording traces of 300 samples" in invoke("trace", *options[:-1], 1).stdout
