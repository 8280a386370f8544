"""`odb plan`: what it predicts is what the real loader does, and bad input is refused by name."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch.utils.data import Dataset
from typer.testing import CliRunner, Result

import odb
from odb.bench.data import LengthSpec, draw_lengths
from odb.cli.plan import plan
from odb.planning import Lengths, Origin, Scenario, forecast, read_lengths, simulate
from odb.planning.forecast import forecast_fixed
from odb.sharding import Seat, ShardSampler
from odb.testing import run_ranks

pytestmark = pytest.mark.timeout(60)

app = typer.Typer()
app.command()(plan)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def lengths_of(*costs: int) -> Lengths:
    return Lengths(costs, costs)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Samples of given lengths; the labels of every ninth are all ignored."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(self.lengths[index])
        labels = torch.full_like(ids, -100) if index % 9 == 8 else ids
        return {"input_ids": ids, "labels": labels}


LONG_TAIL = draw_lengths(LengthSpec(samples=301, mean=60, longest=900)).tolist()
LONG_TAIL[7] = LONG_TAIL[100] = 0
LONG_TAIL[50] = 700
DATASET = Tokens(LONG_TAIL)


def make_dataset() -> Tokens:
    return DATASET


NOT_A_DATASET = 5


# ---------------------------------------------------------------- the plan is the epoch


def real_epoch(rank: int, world_size: int, scenario: Scenario, budget: int) -> dict[str, Any]:
    loader = odb.ODBDataLoader(
        DATASET,
        token_budget=budget,
        window=scenario.window,
        packed=scenario.packed,
        max_samples=scenario.max_samples,
        collate_fn=odb.PadCollate(pad_to_multiple_of=scenario.pad_to_multiple_of),
        join=scenario.join,
        quota=scenario.quota,
        shuffle=scenario.shuffle,
        seed=scenario.seed,
        timeout=30,
    )
    ids = [info.sample_ids for _, info in loader.steps()]
    stats = loader.stats
    loader.close()
    return {"ids": ids, "stats": stats}


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(world_size=2, window=64, seed=3),
        Scenario(world_size=2, window=32, shuffle=False, pad_to_multiple_of=8, max_samples=6),
        Scenario(world_size=2, window=64, packed=True, join=False, quota=150),
    ],
    ids=["shuffled", "in order", "packed quota"],
)
def test_a_plan_is_what_the_loader_then_does(scenario: Scenario) -> None:
    measured = read_lengths(Origin(f"{__name__}:DATASET"))
    predicted = simulate(measured, scenario, 600)
    real = run_ranks(real_epoch, 2, scenario, 600, start_method="fork", timeout=40)
    for rank in range(2):
        assert real[rank]["ids"] == predicted.sample_ids(rank)
    row = forecast(measured, scenario, 600)
    stats = [result["stats"] for result in real]
    assert row.steps == stats[0].steps == stats[1].steps
    assert row.rounds == stats[0].rounds
    assert row.samples == sum(s.samples for s in stats)
    assert row.tokens == sum(s.tokens for s in stats)
    assert row.padded_tokens == sum(s.padded_tokens for s in stats)
    assert row.filtered == sum(len(s.filtered) for s in stats)
    assert row.oversize == sum(len(s.oversize) for s in stats)
    if scenario.join:
        assert row.oversize > 0
        assert row.filtered > 2  # those of no length, and those whose labels are all ignored
        assert row.undelivered == 0


def test_another_seed_or_window_gives_other_steps() -> None:
    """The negative arm: the comparison above can tell plans apart."""
    lengths = lengths_of(*LONG_TAIL)
    base = Scenario(world_size=2, window=64)
    ids = simulate(lengths, base, 600).sample_ids(0)
    assert ids == simulate(lengths, Scenario(world_size=2, window=64), 600).sample_ids(0)
    assert ids != simulate(lengths, Scenario(world_size=2, window=64, seed=1), 600).sample_ids(0)
    assert ids != simulate(lengths, Scenario(world_size=2, window=65), 600).sample_ids(0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_read_what_their_samplers_give(shuffle: bool) -> None:
    scenario = Scenario(world_size=3, shuffle=shuffle, seed=5)
    indices = simulate(lengths_of(*range(1, 18)), scenario, 10).indices
    for rank, own in enumerate(indices):
        assert own == list(ShardSampler(17, Seat(rank, 3), shuffle=shuffle, seed=5))


# ---------------------------------------------------------------- the numbers


def test_the_numbers_of_a_small_plan() -> None:
    # Rank 0 reads 4, 3, 2 and rank 1 reads 8, 1. Within 8 tokens rank 0 forms (4, 3) and (2), rank
    # 1 forms (8) and (1). The longest of a step: 8, then 2.
    row = forecast(lengths_of(4, 8, 3, 1, 2), Scenario(world_size=2, shuffle=False), 8)
    assert (row.steps, row.rounds, row.samples, row.tokens) == (2, 1, 5, 18)
    assert row.padded_tokens == 8 + 2 + 8 + 1
    assert row.padding == pytest.approx(1 / 19)
    assert (row.mean_batch, row.max_batch, row.largest_batch_tokens) == (5 / 4, 2, 8)
    assert row.tokens_per_step == pytest.approx(19 / 4)
    assert row.efficiency == pytest.approx(18 / (2 * 8 + 2 * 2))
    assert (row.idle, row.oversize, row.filtered, row.undelivered) == (0, 0, 0, 0)


def test_idle_steps_and_oversize_samples_are_counted() -> None:
    # Rank 0 reads 5, 5, 0 and rank 1 reads 9, 0: a step of both, then one of rank 0 alone.
    row = forecast(lengths_of(5, 9, 5, 0, 0), Scenario(world_size=2, shuffle=False), 8)
    assert (row.steps, row.oversize, row.filtered) == (2, 1, 2)
    assert row.idle == 1 / 4
    assert row.largest_batch_tokens == 9


def test_fixed_batches_are_sized_for_the_longest_sample() -> None:
    scenario = Scenario(world_size=2, shuffle=False)
    row = forecast_fixed(lengths_of(4, 8, 3, 1, 2), scenario, 16)
    assert row.batching == "fixed 2"
    assert row.steps == 2
    assert row.padded_tokens == 2 * 4 + 2 * 8 + 1 * 2
    assert row.idle == 1 / 4
    too_small = forecast_fixed(lengths_of(4, 8, 3, 1, 2), scenario, 7)
    assert (too_small.batching, too_small.oversize) == ("fixed 1", 1)


def test_packed_batches_have_no_padding() -> None:
    row = forecast(lengths_of(*LONG_TAIL), Scenario(packed=True), 600)
    assert row.padding == 0


def test_nothing_but_empty_samples_is_a_plan_of_no_steps() -> None:
    row = forecast(lengths_of(0, 0, 0), Scenario(world_size=2), 8)
    assert (row.steps, row.rounds, row.filtered, row.efficiency) == (0, 0, 3, 0.0)
    assert forecast_fixed(lengths_of(0, 0, 0), Scenario(world_size=2), 8).steps == 0


# ---------------------------------------------------------------- where lengths come from


def write_parquet(path: Path, column: str, values: list[Any]) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({column: values}), path)


def test_reads_every_kind_of_file(tmp_path: Path) -> None:
    files = {
        "a.txt": "3\n0\n\n12\n",
        "a.json": "[3, 0, 12]",
        "b.json": '[{"length": 3}, {"length": 0, "x": 1}, {"length": 12}]',
        "a.jsonl": '3\n{"length": 0}\n12\n',
        "a.csv": "name,length\nx,3\ny,0\nz, 12\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        assert read_lengths(Origin(str(tmp_path / name))).costs == (3, 0, 12), name
    write_parquet(tmp_path / "a.parquet", "length", [3, 0, 12])
    assert read_lengths(Origin(str(tmp_path / "a.parquet"))).costs == (3, 0, 12)


def test_reads_the_field_or_column_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"n": 3}]')
    (tmp_path / "a.csv").write_text("n,length\n3,9\n")
    write_parquet(tmp_path / "a.parquet", "n", [3])
    for name in ("a.json", "a.csv", "a.parquet"):
        assert read_lengths(Origin(str(tmp_path / name), "n")).costs == (3,)


@pytest.mark.parametrize("name", ["DATASET", "make_dataset"])
def test_measures_a_dataset(name: str) -> None:
    lengths = read_lengths(Origin(f"{__name__}:{name}"))
    assert list(lengths.costs) == LONG_TAIL
    assert lengths.weights[8] == 0
    assert lengths.weights[0] == LONG_TAIL[0] - 1


def double(sample: Any) -> int:
    return 2 * len(sample["input_ids"])


def fractional(sample: Any) -> Any:
    return 1.5


def test_measures_with_a_cost_function() -> None:
    lengths = read_lengths(Origin(f"{__name__}:DATASET", cost_fn=f"{__name__}:double"))
    assert list(lengths.costs) == [2 * length for length in LONG_TAIL]


BAD_FILES = {
    "negative.txt": ("3\n-4\n", "line 2: -4 is not a length"),
    "float.txt": ("3\n4.0\n", "line 2: '4.0' is not a length"),
    "words.csv": ("length\n3\nmany\n", "line 3: 'many' is not a length"),
    "short.csv": ("a,length\n1,3\n1\n", "line 3: '' is not a length"),
    "other.csv": ("tokens\n3\n", "--column"),
    "float.json": ("[3, 4.5]", "item 2: 4.5 is not a length"),
    "true.json": ("[true]", "item 1: True is not a length"),
    "object.json": ('{"length": 3}', "must hold a list"),
    "broken.json": ("[3,", "is not JSON"),
    "field.json": ('[{"tokens": 3}]', "--field"),
    "broken.jsonl": ("3\n{\n", "line 2 is not JSON"),
    "null.jsonl": ("null\n", "line 1: None is not a length"),
    "empty.txt": ("\n", "at least one length"),
    "empty.csv": ("", "at least one length"),
    "empty.json": ("[]", "at least one length"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_where_it_is_bad(name: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[name]
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(odb.ConfigError) as caught:
        read_lengths(Origin(str(path)))
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_bad_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, "length", [3, None])
    with pytest.raises(odb.ConfigError, match="row 2: None is not a length"):
        read_lengths(Origin(str(path)))
    with pytest.raises(odb.ConfigError, match="no column 'n'"):
        read_lengths(Origin(str(path), "n"))
    path.write_text("no parquet")
    with pytest.raises(odb.ConfigError, match="cannot be read as Parquet"):
        read_lengths(Origin(str(path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lengths.xyz", "neither a file of a known kind"),
        ("missing.txt", "no such file"),
        ("no_such_module:data", "cannot import 'no_such_module'"),
        (":data", "must name a module"),
        (f"{__name__}:absent", "has no attribute 'absent'"),
        (f"{__name__}:NOT_A_DATASET", "is a int, not a dataset"),
    ],
)
def test_a_bad_source_is_refused(text: str, message: str) -> None:
    with pytest.raises(odb.ConfigError, match=message):
        read_lengths(Origin(text))


def test_a_bad_cost_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(odb.ConfigError, match=r"sample 0 .* 1\.5"):
        read_lengths(Origin(f"{__name__}:DATASET", cost_fn=f"{__name__}:fractional"))
    (tmp_path / "a.txt").write_text("3\n")
    with pytest.raises(odb.ConfigError, match="leave it out"):
        read_lengths(Origin(str(tmp_path / "a.txt"), cost_fn=f"{__name__}:double"))


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make a package look as if it were not installed."""
    real = builtins.__import__

    def absent(name: str, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(f"No module named {package!r}")
        return real(name, *rest, **named)

    for name in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", absent)


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "a.parquet", "length", [3])
    with monkeypatch.context() as patch:
        without(patch, "pyarrow")
        with pytest.raises(odb.MissingDependencyError, match=r"verified-odb\[parquet\]"):
            read_lengths(Origin(str(tmp_path / "a.parquet")))
    (tmp_path / "a.txt").write_text("3\n")
    with monkeypatch.context() as patch:
        without(patch, "matplotlib")
        plot = tmp_path / "a.png"
        result = invoke(tmp_path / "a.txt", "--budget", 8, "--plot", plot)
        assert result.exit_code == 2
        assert "verified-odb[plot]" in result.stderr


# ---------------------------------------------------------------- the command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, LONG_TAIL)))
    return path


def test_json_is_one_object_on_stdout(file: Path) -> None:
    result = invoke(file, "--budget", "512,1024", "--budget", 2048, "--world-size", 4, "--json")
    assert result.exit_code == 0
    content = json.loads(result.stdout)
    assert [row["budget"] for row in content["odb"]] == [512, 1024, 2048]
    assert [row["budget"] for row in content["fixed"]] == [512, 1024, 2048]
    assert content["scenario"]["world_size"] == 4
    steps = [row["steps"] for row in content["odb"]]
    assert steps == sorted(steps, reverse=True)


def test_the_table_shows_every_budget_against_fixed_batches(file: Path) -> None:
    result = invoke(file, "--budget", "1024,2048", "--world-size", 2)
    assert result.exit_code == 0
    for text in ("1,024", "2,048", "odb", "fixed 1", "fixed 2", "efficiency", "2 samples have no"):
        assert text in result.stdout


def test_draws_a_plot(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = invoke(file, "--budget", "512,1024", "--plot", tmp_path / "plan.png")
    assert result.exit_code == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    nowhere = invoke(file, "--budget", 512, "--plot", tmp_path / "absent" / "plan.png")
    assert nowhere.exit_code == 2
    assert "cannot write the plot" in nowhere.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "many"], "--budget 'many'"),
        (["--budget", "512,0"], "--budget '0'"),
        (["--budget", "512", "--window", "0"], "window must be"),
        (["--budget", "512", "--world-size", "0"], "world size must be"),
        (["--budget", "512", "--quota", "5"], "join=False"),
        (["--budget", "512", "--cost-fn", "a:b"], "leave it out"),
    ],
)
def test_a_bad_option_ends_with_2_and_a_message(
    file: Path, options: list[str], message: str
) -> None:
    result = invoke(file, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
