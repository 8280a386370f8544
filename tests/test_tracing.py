"""Traces: what is recorded is the spec's, and whatever is not is found and named."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import odb
import odb.interpreter
import odb.tracing
from odb.cli import app
from odb.testing import run_ranks
from odb.tracing import Judged, Kind, Report, TraceError, Verdict, encoding
from odb.tracing.performing import perform
from odb.tracing.reading import read_epoch
from odb.tracing.recorder import Recorder, TraceFolder
from spec import messages
from spec.config import Budget, Config, Idle, Mode, Terms
from spec.exchange import Tally
from spec.rank import Rules
from spec.samples import Counts, Sample
from spec.variants import VARIANTS
from spec.world import Crash, LosePeer
from tests import strategies
from tests.test_loader import Sized
from tests.traced_runs import (
    Lines,
    Meeting,
    edit,
    find,
    path_of,
    record_run,
    samples,
)

pytestmark = pytest.mark.timeout(120)

CONFIG = Config(Budget(12), window=8, slow_start=4)
UNEVEN = (samples(3, 5, 0, 2, 9, 4, 4, 7, 1, 2, 6, 30, 2), samples(4, 4, 2, 8, 1, 1))


def broken(report: Report) -> set[str]:
    return {row.name for epoch in report.epochs for row in epoch.broken}


def kinds(report: Report) -> list[Kind]:
    return [d.kind for epoch in report.epochs for d in epoch.divergences]


def first(report: Report) -> odb.tracing.Divergence:
    return report.epochs[0].divergences[0]


# ---------------------------------------------------------------- the encoding

wholes = st.integers(-(2**62), 2**62)
counts = st.builds(Counts, wholes, wholes, wholes)
terms = st.builds(Terms, *[wholes] * len(Terms._fields))
tallies = st.builds(Tally, terms, terms, *[wholes] * (len(Tally._fields) - 2))
some_samples = st.lists(
    st.builds(Sample, wholes, wholes, wholes, st.lists(wholes, max_size=2).map(tuple)), max_size=6
).map(tuple)
names = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3).map(tuple)
)
outcomes = st.one_of(
    st.just(messages.Finished()),
    st.builds(messages.ClosedBy, wholes),
    st.builds(messages.AbortedBy, wholes),
    st.builds(messages.Mismatched, st.text(), wholes, wholes),
    st.builds(messages.Lost, st.none() | wholes),
)
simple = (messages.InputEnded, messages.Failed, messages.Closed, messages.Emitted)
events = st.one_of(
    st.builds(messages.Arrived, some_samples),
    st.sampled_from([kind() for kind in simple]),
    st.builds(messages.Tallied, tallies),
    st.builds(messages.Totalled, st.lists(counts, max_size=4).map(tuple)),
    st.builds(messages.PeerLost, st.none() | wholes),
)


@st.composite
def commands(draw: st.DrawFn) -> tuple[messages.Command, dict[int, Sample]]:
    known = draw(some_samples)
    table = {s.seq: s for s in known}
    group = (
        tuple(draw(st.lists(st.sampled_from(list(table.values())), max_size=5))) if table else ()
    )
    local, total = draw(counts), draw(counts)
    block = draw(st.one_of(st.none(), st.builds(messages.Block, wholes, wholes, counts)))
    alone = messages.Block(0, 1, total)
    step = messages.Step(draw(wholes), draw(wholes), group, local, total, block or alone)
    choices: list[messages.Command] = [
        messages.Pull(draw(wholes)),
        messages.PostReport(draw(tallies)),
        messages.ShareSpare(draw(wholes)),
        messages.PostCounts(tuple(draw(st.lists(counts, max_size=4)))),
        messages.Emit(step),
        messages.Retire(),
        messages.GiveUp(),
        messages.ShareReason(draw(wholes)),
        messages.End(draw(outcomes)),
        *(kind(s) for s in table.values() for kind in (messages.Filter, messages.KeepSpare)),
    ]
    return draw(st.sampled_from(choices)), table


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@given(events, st.data())
def test_every_event_comes_back_with_the_names_of_its_samples(
    event: messages.Event, data: st.DataObject
) -> None:
    arrived = event.samples if isinstance(event, messages.Arrived) else ()
    called = {s.seq: data.draw(names) for s in arrived}
    value = through_json(encoding.event_to_json(event, lambda seqs: [called[seq] for seq in seqs]))
    assert encoding.event_from_json(value) == event
    assert encoding.ids_from_json(value) == tuple(called[s.seq] for s in arrived)


@given(commands())
def test_every_command_comes_back(case: tuple[messages.Command, dict[int, Sample]]) -> None:
    command, known = case
    value = through_json(encoding.command_to_json(command))
    assert encoding.command_from_json(value, known) == command


@given(strategies.configs())
def test_every_configuration_comes_back(config: Config) -> None:
    assert encoding.config_from_json(through_json(encoding.config_to_json(config))) == config


def test_every_kind_of_event_and_command_is_written() -> None:
    """A new kind cannot be forgotten: these are all members of the unions."""
    assert {type(e) for e in (messages.Emitted(), messages.Failed())} < set(messages.Event.__args__)
    source = Path(encoding.__file__).read_text()
    for kind in (*messages.Event.__args__, *messages.Command.__args__, *messages.Outcome.__args__):
        assert f" {kind.__name__}(" in source, kind


@pytest.mark.parametrize("name", [True, 1.5, frozenset({1}), b"x"])
def test_a_name_of_another_kind_is_kept_as_its_text(name: Any) -> None:
    value = through_json(encoding.id_to_json(("a", name)))
    back = encoding.id_from_json(value)
    assert back == encoding.id_from_json(value)
    assert back != ("a", name)
    assert repr(name) in repr(back)


@pytest.mark.parametrize("bad", [None, [], ["Nap"], ["Emitted", 1], ["Arrived", 0, [1], [2], []]])
def test_what_is_no_event_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        encoding.event_from_json(bad)


# ---------------------------------------------------------------- runs that conform


@given(
    config=strategies.configs(),
    shards=st.lists(strategies.shards(most=14), min_size=1, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_whatever_is_recorded_conforms(
    tmp_path_factory: pytest.TempPathFactory, config: Config, shards: list[tuple[Sample, ...]]
) -> None:
    extras = len(config.budget.extras)
    shards = [tuple(s._replace(extras=(1,) * extras) for s in shard) for shard in shards]
    folder = tmp_path_factory.mktemp("traces")
    shells = record_run(folder, config, shards)
    report = odb.tracing.check(folder)
    assert report.conforms, str(report)
    assert report.epochs[0].steps == max(len(shell.steps) for shell in shells)
    shutil.rmtree(folder)


ENDINGS: dict[str, dict[str, dict[int, Any]]] = {
    "a sample cannot be read": {"fail_at": {1: 2}},
    "the first sample cannot be read": {"fail_at": {0: 0}},
    "a batch cannot be made": {"fail_batch": {0: 1}},
    "both ranks fail": {"fail_at": {0: 5, 1: 2}},
    "a trainer stops": {"stop_after": {1: 2}},
    "a trainer stops at once": {"stop_after": {0: 0}},
    "one stops, one fails": {"stop_after": {0: 1}, "fail_batch": {1: 1}},
}


@pytest.mark.parametrize("what", ENDINGS)
@pytest.mark.parametrize("idle", Idle)
def test_runs_that_end_early_conform(tmp_path: Path, what: str, idle: Idle) -> None:
    """Promise: uniform-abort."""
    config = Config(Budget(12), window=4, slow_start=4, idle=idle)
    record_run(tmp_path, config, UNEVEN, **ENDINGS[what])
    report = odb.tracing.check(tmp_path)
    assert report.conforms, str(report)
    assert "finished" not in report.epochs[0].outcome


def test_a_link_that_breaks_conforms_on_every_rank(tmp_path: Path) -> None:
    for most in range(7):
        folder = tmp_path / str(most)
        record_run(folder, CONFIG, UNEVEN, meeting=Meeting(2, most=most))
        report = odb.tracing.check(folder)
        assert report.conforms, str(report)
        assert "lost" in report.epochs[0].outcome


def test_a_link_that_breaks_before_the_last_command_is_written_down(tmp_path: Path) -> None:
    """The spare is being shared; the counts behind it are never posted."""
    record_run(tmp_path, CONFIG, (samples(3), ()), meeting=Meeting(2, most=1))
    assert odb.tracing.check(tmp_path).conforms
    lines = path_of(tmp_path, 0).read_text()
    assert '"begun":[["ShareSpare",0]]' in lines
    assert '"why":"LinkBroken: the test has cut it"' in lines


# ---------------------------------------------------------------- real runs


class Broken(Sized):
    """Sample `bad` cannot be read."""

    def __init__(self, bad: int, *lengths: int) -> None:
        super().__init__(*lengths)
        self.bad = bad

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise OSError("unreadable")
        return super().__getitem__(index)


LENGTHS = (*((7 * i) % 23 for i in range(60)), 90)
REAL: dict[str, dict[str, Any]] = {
    "join pad": {},
    "join stop": {"idle": "stop"},
    "quota": {"join": False, "quota": 20},
    "no quota": {"join": False},
    "skip": {"on_error": "skip", "bad": 7},
    "raise": {"bad": 40},
    "stop": {"stop_after": 2},
}


def real_run(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> None:
    options = dict(options)
    bad, stop_after = options.pop("bad", -1), options.pop("stop_after", None)
    dataset = Broken(bad, *LENGTHS)
    loader = odb.ODBDataLoader(
        dataset, token_budget=40, window=12, slow_start=4, num_workers=rank % 2,
        trace_dir=folder, timeout=60, **options,
    )  # fmt: skip
    for _ in range(2):
        try:
            for _, info in loader.steps():
                if info.step == stop_after:
                    break
        except (odb.PipelineError, odb.PeerFailedError):
            assert bad >= 0
    loader.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_real_runs_conform(tmp_path: Path, world_size: int) -> None:
    """Two epochs of a real loader on real processes, in every mode and with every kind of end."""
    for what, options in REAL.items():
        folder = tmp_path / what.replace(" ", "-")
        run_ranks(
            real_run, world_size, str(folder), options, start_method="fork", timeout=60,
            process_group=world_size > 1,
        )  # fmt: skip
        report = odb.tracing.check(folder)
        assert report.conforms, f"{what}: {report}"
        assert [epoch.epoch for epoch in report.epochs] == [0, 1]
        assert report.epochs[0].world_size == world_size
        if what in ("join pad", "join stop"):
            assert report.epochs[0].samples == sum(length > 0 for length in LENGTHS)


# ---------------------------------------------------------------- tampered traces


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    record_run(tmp_path, CONFIG, UNEVEN)
    assert odb.tracing.check(tmp_path).conforms
    return tmp_path


def drop_an_emitted(lines: Lines) -> None:
    del lines[find(lines, "Emitted", 2)]


def change_a_cost(lines: Lines) -> None:
    lines[find(lines, "Arrived")]["event"][3][0] += 1


def change_a_tally(lines: Lines) -> None:
    lines[find(lines, "Tallied", 1)]["event"][1][-7] -= 1  # limit, negated


def swap_two_groups(lines: Lines) -> None:
    steps = [c for line in lines for c in line.get("do", []) if c[0] == "Emit"]
    steps[0][3], steps[1][3] = steps[1][3], steps[0][3]


def drop_a_sample_from_a_step(lines: Lines) -> None:
    next(c for line in lines for c in line.get("do", []) if c[0] == "Emit" and len(c[3]) > 1)[
        3
    ].pop()


def change_a_total(lines: Lines) -> None:
    lines[find(lines, "Totalled")]["event"][1][0][2] += 1


def rename_a_sample(lines: Lines) -> None:
    lines[find(lines, "Arrived")]["event"][2][0] = 0  # which rank 0 has


def invent_a_filter(lines: Lines) -> None:
    lines[find(lines, "Arrived")]["do"].insert(0, ["Filter", 0])


def change_a_state(lines: Lines) -> None:
    lines[find(lines, "Totalled")]["state"][5] += 1


def change_the_end(lines: Lines) -> None:
    lines[-1]["end"] = ["ClosedBy", 0]


def go_on_behind_the_end(lines: Lines) -> None:
    lines.append(lines[-2])


def skip_a_command(lines: Lines) -> None:
    at = find(lines, "Totalled")
    lines[at]["begun"] = []


def feed_what_was_not_asked_for(lines: Lines) -> None:
    lines[find(lines, "Arrived")]["event"] = ["Emitted"]


def number_a_sample_twice(lines: Lines) -> None:
    lines[find(lines, "Arrived", 1)]["event"][1] = 0


TAMPERED: dict[Callable[[Lines], None], tuple[Kind | None, str | None, str]] = {
    drop_an_emitted: (Kind.EVENT, "step-alignment", "emits step 2"),
    change_a_cost: (Kind.COMMAND, None, "spec"),
    change_a_tally: (Kind.EXCHANGE, None, "limit"),
    swap_two_groups: (Kind.COMMAND, None, "emits step 0 with"),
    drop_a_sample_from_a_step: (Kind.COMMAND, "identity-coverage", "emits step"),
    change_a_total: (Kind.EXCHANGE, None, "adds up step 1 of the round"),
    rename_a_sample: (None, "identity-coverage", "both sample 0 of the dataset"),
    invent_a_filter: (Kind.COMMAND, "identity-coverage", "filters sample 0"),
    change_a_state: (Kind.STATE, None, "samples in the window"),
    change_the_end: (Kind.END, "uniform-abort", "finished"),
    go_on_behind_the_end: (Kind.END, None, "goes on"),
    skip_a_command: (Kind.PERFORMED, None, "posts counts"),
    feed_what_was_not_asked_for: (Kind.EVENT, None, "waits for Arrived"),
    number_a_sample_twice: (Kind.EVENT, "identity-coverage", "expected samples numbered from"),
}


@pytest.mark.parametrize("tamper", TAMPERED, ids=lambda tamper: tamper.__name__)
def test_a_tampered_trace_is_caught(recorded: Path, tamper: Callable[[Lines], None]) -> None:
    kind, promise, says = TAMPERED[tamper]
    edit(recorded, 1, tamper)
    report = odb.tracing.check(recorded)
    assert report.verdict is Verdict.DIVERGES
    if kind is not None:
        assert first(report).kind is kind, str(report)
        assert (first(report).rank, first(report).path) == (1, path_of(recorded, 1))
    if promise is not None:
        assert promise in broken(report), str(report)
    assert says in str(report)


def test_the_first_divergence_is_placed_and_put_in_words(recorded: Path) -> None:
    edit(recorded, 0, drop_a_sample_from_a_step)
    report = odb.tracing.check(recorded)
    text = str(first(report))
    assert f"{path_of(recorded, 0)}, line 8: rank 0, round 0, step 2: " in text
    says = "the spec emits step 2 with samples 1 and 0; the trace says: emits step 2 with sample 1"
    assert says in text


def test_of_several_divergences_the_first_cause_is_named(recorded: Path) -> None:
    """Rank 0 is told a wrong tally; rank 1, much later, emits a wrong group."""
    edit(recorded, 0, change_a_tally)
    edit(recorded, 1, lambda lines: lines[-3].update(do=[]))
    report = odb.tracing.check(recorded)
    assert first(report).kind is Kind.EXCHANGE
    assert first(report).rank == 0
    assert len(kinds(report)) >= 2


def test_a_rank_in_another_exchange_is_caught(recorded: Path) -> None:
    def post_fewer(lines: Lines) -> None:
        command = lines[find(lines, "Tallied")]["do"][-1]
        command[1].pop()

    edit(recorded, 1, post_fewer)
    report = odb.tracing.check(recorded)
    assert first(report).kind is Kind.COMMAND
    assert Kind.EXCHANGE in kinds(report)
    assert "posts counts for" in str(report)


# ---------------------------------------------------------------- traces that break off


def test_a_trace_without_an_end_is_incomplete_and_no_divergence(recorded: Path) -> None:
    edit(recorded, 1, lambda lines: lines[:-1])
    report = odb.tracing.check(recorded)
    assert report.verdict is Verdict.INCOMPLETE
    assert not kinds(report)
    assert "breaks off" in str(report)


def test_every_cut_of_a_trace_is_incomplete_and_no_divergence(recorded: Path) -> None:
    """Also in the middle of a line, and down to an empty file."""
    path = path_of(recorded, 1)
    data = path.read_bytes()
    for length in [*range(0, len(data) - 1, 97), len(data) - 1]:
        path.write_bytes(data[:length])
        report = odb.tracing.check(recorded)
        assert report.verdict is Verdict.INCOMPLETE, f"{length}: {report}"
    assert "in the middle of a line" in str(report)


def test_a_missing_rank_is_said_and_the_others_are_checked(recorded: Path) -> None:
    path_of(recorded, 1).unlink()
    report = odb.tracing.check(recorded)
    assert report.verdict is Verdict.INCOMPLETE
    assert report.epochs[0].missing == ("rank 1: there is no file",)
    unknown = {p.name for p in report.epochs[0].promises if p.judged is Judged.UNKNOWN}
    assert unknown == {"identity-coverage", "bounded-termination", "exact-gradient"}
    edit(recorded, 0, drop_a_sample_from_a_step)
    assert odb.tracing.check(recorded).verdict is Verdict.DIVERGES


def test_a_total_below_what_is_known_is_caught_without_the_other_rank(recorded: Path) -> None:
    path_of(recorded, 1).unlink()
    edit(recorded, 0, lambda lines: lines[find(lines, "Totalled")]["event"][1][0].__setitem__(0, 0))
    assert Kind.EXCHANGE in kinds(odb.tracing.check(recorded))


# ---------------------------------------------------------------- what is no trace


def change_header(**values: Any) -> Callable[[Lines], None]:
    return lambda lines: lines[0].update(values)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (change_header(odb_trace=99), "format 99"),
        (change_header(protocol=99), "protocol version 99"),
        (change_header(rank=0), "is of rank 0, not of rank 1"),
        (change_header(epoch=3), "is of epoch 3, not of epoch 0"),
        (change_header(world_size=5), "is of a run of 5 ranks"),
        (change_header(config={}), "cannot be understood"),
        (change_header(rank="one"), "are ['one'"),
        (lambda lines: lines[1:], "no trace of odb"),
        (lambda lines: [*lines[:4], {"event": ["Nap"]}, *lines[4:]], "line 5"),
    ],
)
def test_files_that_do_not_belong_are_refused(
    recorded: Path, change: Callable[[Lines], Any], says: str
) -> None:
    edit(recorded, 1, change)
    with pytest.raises(TraceError) as caught:
        odb.tracing.check(recorded)
    assert says in str(caught.value)
    assert str(path_of(recorded, 1)) in str(caught.value)
    assert isinstance(caught.value, odb.ODBError)


def test_mixed_epochs_are_refused(tmp_path: Path) -> None:
    record_run(tmp_path / "a", CONFIG, UNEVEN)
    record_run(tmp_path / "b", CONFIG, UNEVEN, epoch=1)
    shutil.copy(path_of(tmp_path / "b", 1, epoch=1), path_of(tmp_path / "a", 1))
    with pytest.raises(TraceError, match="is of epoch 1, not of epoch 0"):
        odb.tracing.check(tmp_path / "a")
    edit(tmp_path / "a", 1, change_header(epoch=0))  # and if its first line lies?
    assert odb.tracing.check(tmp_path / "a").verdict is Verdict.DIVERGES


def test_mixed_runs_are_caught(tmp_path: Path) -> None:
    record_run(tmp_path / "a", CONFIG, UNEVEN)
    record_run(tmp_path / "b", CONFIG, (UNEVEN[1], UNEVEN[0]))
    shutil.copy(path_of(tmp_path / "b", 1), path_of(tmp_path / "a", 1))
    assert Kind.EXCHANGE in kinds(odb.tracing.check(tmp_path / "a"))


def test_folders_and_text_that_are_no_traces(tmp_path: Path, recorded: Path) -> None:
    for folder, says in (
        (tmp_path / "none", "no such folder"),
        (tmp_path / "x", "holds no traces"),
    ):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(TraceError, match=says):
            odb.tracing.check(folder)
    with pytest.raises(TraceError, match="holds no epoch 7, only 0"):
        odb.tracing.check(recorded, epoch=7)
    path_of(recorded, 1).write_text("hello\nworld\n")
    with pytest.raises(TraceError, match=r"rank-00001.jsonl, line 1: is no JSON"):
        odb.tracing.check(recorded)


# ---------------------------------------------------------------- mutants

MANY = (samples(*[2, 5, 3, 7, 1, 9, 4, 6] * 4), samples(*[3, 3, 8, 2] * 3))
ONE_LEFT = (samples(*[9, 8, 7, 9] * 3), samples(3))
SHORT = (samples(*[1] * 30), samples(*[1] * 20))
QUOTA = Config(Budget(12), window=8, slow_start=4, mode=Mode.QUOTA, quota=9)

MUTANTS: dict[str, tuple[str, Config, dict[str, Any]]] = {
    "delivers-twice": ("identity-coverage", CONFIG, {}),
    "carry-dropped": ("identity-coverage", CONFIG, {"shards": ONE_LEFT}),
    "finish-with-first-drained": ("identity-coverage", CONFIG, {}),
    "one-token-more": ("budget", Config(Budget(12), 16, 16), {"shards": SHORT}),
    "longer-window": ("bounded-memory", CONFIG, {}),
    "carry-keeps-youngest": ("bounded-delay", Config(Budget(12), window=3, slow_start=3), {}),
    "finish-asked-again": ("bounded-termination", CONFIG, {"meeting": lambda: Meeting(2, most=90)}),
    "idles-without-quota": ("quota-closure", Config(Budget(12), 8, mode=Mode.QUOTA), {}),
    "quota-ignored": ("quota-closure", QUOTA, {}),
    "failure-ignored": ("uniform-abort", CONFIG, {"fail_at": {1: 4}}),
    "steps-reversed": ("step-alignment", CONFIG, {}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_changed_protocol_is_caught(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run diverges from the shipped spec, and the promise falls on what was recorded."""
    promise, config, options = MUTANTS[name]
    variant = VARIANTS[name]
    monkeypatch.setattr(odb.interpreter, "transition", variant.machine)
    if "meeting" in options:
        options = {**options, "meeting": options["meeting"]()}
    shards = options.get("shards", MANY)
    options = {name: value for name, value in options.items() if name != "shards"}
    record_run(tmp_path, config, shards, rules=variant.rules, **options)
    monkeypatch.undo()
    report = odb.tracing.check(tmp_path)
    assert report.verdict is Verdict.DIVERGES
    assert kinds(report), "the replay must notice by itself"
    assert promise in broken(report), str(report)
    if variant.rules != Rules():
        assert "another rule than the shipped one" in " ".join(report.epochs[0].notes)


def test_a_transport_that_adds_wrongly_breaks_the_gradient(tmp_path: Path) -> None:
    record_run(tmp_path, CONFIG, UNEVEN, meeting=Meeting(2, add=1))
    report = odb.tracing.check(tmp_path)
    assert "exact-gradient" in broken(report)
    assert first(report).kind is Kind.EXCHANGE


def test_every_promise_has_something_that_breaks_it() -> None:
    from odb.tracing.judging import PROMISES

    covered = {promise for promise, _, _ in MUTANTS.values()} | {"exact-gradient"}
    assert covered == set(PROMISES)


def test_a_crash_of_the_driver_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fall_over(setup: Any, state: Any, event: Any) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(odb.interpreter, "transition", fall_over)
    record_run(tmp_path, CONFIG, UNEVEN)
    monkeypatch.undo()
    report = odb.tracing.check(tmp_path)
    assert set(kinds(report)) == {Kind.CRASH}
    assert "ZeroDivisionError: a defect" in str(report)


# ---------------------------------------------------------------- folders and disks


def traced(folder: Path) -> odb.ODBDataLoader:
    return odb.ODBDataLoader(Sized(*[3, 5, 2] * 4), token_budget=12, window=6, trace_dir=folder)


def test_two_epochs_and_the_same_epoch_again(tmp_path: Path) -> None:
    loader = traced(tmp_path)
    for epoch in (0, 1, 1):
        loader.set_epoch(epoch)
        list(loader.steps())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["epoch-00000", "epoch-00001", "epoch-00001-again-1"]
    assert odb.tracing.check(tmp_path).conforms
    assert len(odb.tracing.check(tmp_path, epoch=1).epochs) == 2
    assert odb.tracing.check(tmp_path / "epoch-00001").conforms


def test_a_folder_with_traces_is_refused_at_once(tmp_path: Path) -> None:
    list(traced(tmp_path).steps())
    with pytest.raises(odb.ConfigError, match=r"holds epoch-00000 already.*empty folder"):
        traced(tmp_path)


def test_two_loaders_with_one_folder_are_refused_before_training(tmp_path: Path) -> None:
    first_, second = traced(tmp_path), traced(tmp_path)
    list(first_.steps())
    with pytest.raises(odb.ConfigError, match="two loaders must not be mixed"):
        second.steps()
    assert odb.tracing.check(tmp_path).conforms


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(odb.ConfigError, match="cannot be used"):
        traced(tmp_path / "file" / "traces")


def test_a_full_disk_ends_the_recording_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, left = os.write, [5]

    def full(descriptor: int, data: bytes) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data if left[0] else data[:10])

    monkeypatch.setattr("odb.tracing.recorder.os.write", full)
    loader = traced(tmp_path)
    with caplog.at_level(logging.WARNING, "odb"):
        for _ in range(2):
            assert sum(info.local_samples for _, info in loader.steps()) == 12
    monkeypatch.undo()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "has stopped" in caplog.text
    report = odb.tracing.check(tmp_path)
    assert report.verdict is Verdict.INCOMPLETE
    assert not kinds(report)


def test_a_folder_that_cannot_be_written_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    loader = traced(tmp_path)
    monkeypatch.setattr("odb.tracing.recorder.os.open", refuse)
    assert sum(info.local_samples for _, info in loader.steps()) == 12
    assert "Permission denied" in caplog.text


def test_a_loader_that_records_can_be_copied(tmp_path: Path) -> None:
    copy = pickle.loads(pickle.dumps(traced(tmp_path)))
    list(copy.steps())
    assert odb.tracing.check(tmp_path).conforms


def test_a_killed_rank_loses_at_most_a_line(tmp_path: Path) -> None:
    """SIGKILL in the middle of an epoch; what was recorded is replayed without a divergence."""
    code = f"""
import os, odb
from tests.test_loader import Sized
options = dict(token_budget=12, window=6, trace_dir={str(tmp_path)!r})
loader = odb.ODBDataLoader(Sized(*[3, 5, 2] * 40), **options)
for _, info in loader.steps():
    if info.step == 5:
        os.kill(os.getpid(), 9)
"""
    result = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert result.returncode == -9
    report = odb.tracing.check(tmp_path)
    assert report.verdict is Verdict.INCOMPLETE
    assert not kinds(report)
    assert report.epochs[0].steps >= 5  # step 5 had reached the trainer, perhaps not yet the trace
    assert "its process was killed" in str(report)


def test_a_failure_is_recorded_with_its_summary(tmp_path: Path) -> None:
    record_run(tmp_path, CONFIG, UNEVEN, fail_at={1: 2})
    lines = [json.loads(line) for line in path_of(tmp_path, 1).read_text().splitlines()]
    assert lines[find(lines, "Failed")]["why"] == "RuntimeError: cannot read sample 2"
    trace = read_epoch(tmp_path / "epoch-00000").ranks[1]
    assert [line.why for line in trace.lines if line.why] == ["RuntimeError: cannot read sample 2"]


def test_the_recorder_is_what_the_interpreter_asks_for(tmp_path: Path) -> None:
    from odb.observer import Observer

    setup = odb.interpreter.Setup(CONFIG, 0, 1)
    observer: Observer = Recorder(TraceFolder(tmp_path).open(setup, 0, True), list)
    observer.ended()


# ---------------------------------------------------------------- the command line


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def test_check_prints_a_table_and_exits_by_the_verdict(recorded: Path, tmp_path: Path) -> None:
    good = invoke("check", recorded)
    assert good.exit_code == 0, good.output
    assert "conforms" in good.output
    assert "finished" in good.output
    out = tmp_path / "r.json"
    edit(recorded, 1, swap_two_groups)
    bad = invoke("check", recorded, "--json", out)
    assert bad.exit_code == 1
    assert "diverges" in bad.output
    report = json.loads(out.read_text())
    assert report["verdict"] == "diverges"
    assert report["epochs"][0]["divergences"][0]["kind"] == "COMMAND"
    path_of(recorded, 1).write_text("{}\n")
    none = invoke("check", recorded)
    assert (none.exit_code, "no trace of odb" in none.output) == (2, True)


def test_show_prints_the_ranks_side_by_side(recorded: Path) -> None:
    result = invoke("show", recorded, "--limit", 8)
    assert result.exit_code == 0, result.output
    assert "rank 0" in result.output
    assert "rank 1" in result.output
    assert "more rows" in result.output
    rows = json.loads(invoke("show", recorded, "--json", "--limit", 1000).output)["rows"]
    texts = [cell["text"] for row in rows for cell in row["ranks"].values()]
    assert "ends the epoch: finished" in texts
    assert sum(text.startswith("step ") for text in texts) == 2 * max(
        cell["step"] for row in rows for cell in row["ranks"].values()
    )


def test_show_can_be_bounded_to_steps(recorded: Path) -> None:
    rows = json.loads(invoke("show", recorded, "--json", "--steps", "0-1").output)["rows"]
    assert {row["round"] for row in rows} == {0}
    assert invoke("show", recorded, "--steps", "x").exit_code == 2
    assert invoke("show", recorded, "--ranks", "9").exit_code == 2


@pytest.mark.parametrize("what", [None, *ENDINGS])
def test_a_run_is_drawn_like_a_counterexample(tmp_path: Path, what: str | None) -> None:
    """The closed system performs what was recorded, to the last end."""
    config = Config(Budget(12), window=4, slow_start=4)
    record_run(tmp_path, config, UNEVEN, **ENDINGS.get(what or "", {}))
    traces = read_epoch(tmp_path / "epoch-00000")
    trace = perform(traces, None, limit=10_000)
    end = trace.states[-1]
    assert not trace.promise
    for rank, of_rank in traces.ranks.items():
        assert of_rank.end is not None
        assert end.nodes[rank].outcome == of_rank.end.outcome
        assert encoding.state_to_json(end.nodes[rank].machine) == of_rank.end.state
    page = tmp_path / "run.html"
    assert invoke("show", tmp_path, "--html", page, "--limit", "9").exit_code == 0
    assert "odb trace" in page.read_text()
    assert "counterexample" not in page.read_text()
    diagram = invoke("show", tmp_path, "--mermaid").output
    assert diagram.startswith("sequenceDiagram")
    assert "BROKEN" not in diagram


def test_a_run_that_diverges_is_drawn_up_to_there(recorded: Path) -> None:
    edit(recorded, 1, drop_a_sample_from_a_step)
    diagram = invoke("show", recorded, "--mermaid", "--limit", "10000").output
    assert "BROKEN: conformance" in diagram
    assert "finds the end" not in diagram


def test_drawing_is_bounded_to_steps_and_refuses_what_it_cannot(recorded: Path) -> None:
    diagram = invoke("show", recorded, "--mermaid", "--steps", "3-4", "--limit", "100").output
    assert "takes step 3" in diagram
    assert "round 0" not in diagram
    assert invoke("show", recorded, "--mermaid", "--steps", "900").exit_code == 2
    path_of(recorded, 1).unlink()
    refused = invoke("show", recorded, "--mermaid")
    assert (refused.exit_code, "rank 1 has no trace" in refused.output) == (2, True)


def test_a_killed_rank_is_drawn_as_a_crash(tmp_path: Path) -> None:
    record_run(tmp_path, CONFIG, UNEVEN, meeting=Meeting(2, most=3))
    edit(tmp_path, 1, lambda lines: lines[:-2])
    trace = perform(read_epoch(tmp_path / "epoch-00000"), None, limit=10_000)
    assert [action for action in trace.actions if isinstance(action, Crash)] == [Crash(1)]
    assert LosePeer(0) in trace.actions
