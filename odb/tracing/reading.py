"""Reads traces back: folders, files and lines; its errors name the place of what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from odb.errors import ODBError
from odb.info import SampleId
from odb.tracing import encoding
from odb.tracing.recorder import FORMAT
from spec.config import PROTOCOL_VERSION, Config
from spec.messages import Arrived, Command, Event, Outcome
from spec.samples import Sample

EPOCH_FOLDER = re.compile(r"epoch-(\d+)(?:-again-\d+)?")
RANK_FILE = re.compile(r"rank-(\d+)\.jsonl")


class TraceError(ODBError):
    """A file is no trace, or not one that can be read together with the others."""

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        where = str(path) if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {problem}")
        self.path = path
        self.line = line


@dataclass(frozen=True)
class Header:
    """The first line of a trace. divided: odb divided the dataset, so that names of samples are
    unique. rules: those that are not the shipped ones."""

    odb: str
    rank: int
    world_size: int
    epoch: int
    divided: bool
    config: Config
    rules: dict[str, str]


@dataclass(frozen=True)
class Line:
    """One transition: what the machine took (None: it started) and what it gave. ids: the names of
    the samples that arrived. begun: where they differ, the commands of the line before that were
    carried out. state: the summary of the state behind it. why: an error's summary."""

    number: int
    time: float
    event: Event | None
    ids: tuple[SampleId, ...]
    commands: tuple[Command, ...]
    begun: tuple[Command, ...] | None
    state: list[Any] | None
    why: str | None


@dataclass(frozen=True)
class Ending:
    """The last line."""

    number: int
    time: float
    outcome: Outcome
    state: list[Any] | None


@dataclass
class RankTrace:
    """One rank's file. end: None if it breaks off. torn: its last line is cut off. crash: a defect
    of odb that ended it. beyond: the number of a line behind the end, which there must not be."""

    path: Path
    header: Header
    lines: list[Line] = field(default_factory=list)
    end: Ending | None = None
    torn: bool = False
    crash: str | None = None
    beyond: int | None = None

    @property
    def rank(self) -> int:
        """The rank that it is of."""
        return self.header.rank


@dataclass
class EpochTraces:
    """All files of an epoch. `empty`: ranks whose file holds not even a first line."""

    folder: Path
    epoch: int
    world_size: int
    ranks: dict[int, RankTrace]
    empty: tuple[int, ...] = ()


def epoch_folders(folder: Path, epoch: int | None = None) -> list[Path]:
    """The folders of the epochs (or of one epoch) below that of the traces, in order. A folder of
    one epoch may be given itself. Raises TraceError if there is none."""
    if EPOCH_FOLDER.fullmatch(folder.resolve().name) and any(folder.glob("rank-*.jsonl")):
        return [folder]
    if not folder.is_dir():
        raise TraceError(folder, None, "there is no such folder")
    found = [path for path in folder.iterdir() if EPOCH_FOLDER.fullmatch(path.name)]
    if not found:
        raise TraceError(folder, None, "holds no traces (folders called epoch-00000 and so on)")
    chosen = [path for path in found if epoch is None or _epoch_of(path) == epoch]
    if not chosen:
        numbers = ", ".join(map(str, sorted({_epoch_of(path) for path in found})))
        raise TraceError(folder, None, f"holds no epoch {epoch}, only {numbers}")
    return sorted(chosen, key=lambda path: (_epoch_of(path), len(path.name), path.name))


def _epoch_of(folder: Path) -> int:
    match = EPOCH_FOLDER.fullmatch(folder.resolve().name)
    assert match is not None
    return int(match[1])


def read_epoch(folder: Path) -> EpochTraces:
    """All ranks of an epoch. Raises TraceError if its files do not belong together."""
    epoch = _epoch_of(folder)
    paths = sorted(p for p in folder.iterdir() if RANK_FILE.fullmatch(p.name))
    if not paths:
        raise TraceError(folder, None, "holds no traces of ranks (rank-00000.jsonl and so on)")
    ranks: dict[int, RankTrace] = {}
    empty = []
    for path in paths:
        trace, rank = read_rank(path), int(path.stem.partition("-")[2])
        if trace is None:
            empty.append(rank)
            continue
        header = trace.header
        if header.rank != rank:
            raise TraceError(path, 1, f"is of rank {header.rank}, not of rank {rank}")
        if header.epoch != epoch:
            raise TraceError(path, 1, f"is of epoch {header.epoch}, not of epoch {epoch}")
        first = next(iter(ranks.values()), trace)
        if header.world_size != first.header.world_size:
            sizes = f"{header.world_size} ranks, {first.path.name} of {first.header.world_size}"
            raise TraceError(path, 1, f"is of a run of {sizes}")
        ranks[rank] = trace
    if not ranks:
        raise TraceError(folder, None, "no file holds a whole first line")
    world_size = next(iter(ranks.values())).header.world_size
    for rank in (*ranks, *empty):
        if rank >= world_size:
            problem = f"a run of {world_size} ranks has no rank {rank}"
            raise TraceError(folder, None, problem)
    return EpochTraces(folder, epoch, world_size, ranks, tuple(empty))


def read_rank(path: Path) -> RankTrace | None:
    """One file; None if it was cut off in its first line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error}") from None
    *whole, rest = data.split(b"\n")
    if not whole:
        if rest and not rest.startswith(b'{"odb_trace"'[: len(rest)]):
            raise TraceError(path, 1, "this is no trace of odb")
        return None
    return _Reader(path, bool(rest)).read(whole)


class _Known(dict[int, Sample]):
    """The samples that have arrived. One that has not is known by its number alone, so that a
    command that names it is that of no spec."""

    def get(self, seq: int, default: Any = None) -> Sample:
        return super().get(seq) or Sample(seq, -1, -1)


class _Reader:
    def __init__(self, path: Path, torn: bool) -> None:
        self._path = path
        self._torn = torn
        self._known = _Known()

    def read(self, raw: list[bytes]) -> RankTrace:
        values = self._values(raw)
        _, first = next(values)
        trace = RankTrace(self._path, self._header(first), torn=self._torn)
        for number, value in values:
            try:
                self._add(trace, number, value)
            except (KeyError, ValueError, TypeError) as error:
                self._fail(number, f"is no line of a trace: {error}")
        return trace

    def _values(self, raw: list[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, text in enumerate(raw, start=1):
            try:
                value = json.loads(text)
            except ValueError as error:
                self._fail(number, f"is no JSON: {error}")
            if not isinstance(value, dict):
                self._fail(number, "is no line of a trace")
            yield number, value

    def _header(self, value: dict[str, Any]) -> Header:
        if "odb_trace" not in value:
            self._fail(1, "this is no trace of odb")
        if value["odb_trace"] != FORMAT:
            self._fail(1, f"has format {value['odb_trace']}; this odb reads format {FORMAT}")
        if value.get("protocol") != PROTOCOL_VERSION:
            theirs, ours = value.get("protocol"), PROTOCOL_VERSION
            self._fail(1, f"is of protocol version {theirs}; this odb has version {ours}")
        try:
            rules = {str(k): str(v) for k, v in value.get("rules", {}).items()}
            numbers = [value[name] for name in ("rank", "world_size", "epoch")]
            if any(type(number) is not int or number < 0 for number in numbers):
                self._fail(1, f"rank, world size and epoch are {numbers}")
            config = encoding.config_from_json(value["config"])
            rank, world_size, epoch = numbers
            own = str(value["odb"])
            return Header(own, rank, world_size, epoch, bool(value["divided"]), config, rules)
        except (KeyError, ValueError, AttributeError) as error:
            self._fail(1, f"the first line cannot be understood: {error}")

    def _add(self, trace: RankTrace, number: int, value: dict[str, Any]) -> None:
        if "crash" in value:
            trace.crash = str(value["crash"])
            return
        if trace.end is not None:
            trace.beyond = trace.beyond or number
            return
        if "end" in value:
            outcome = encoding.outcome_from_json(value["end"])
            trace.end = Ending(number, value["t"], outcome, value.get("state"))
            return
        event = None
        if trace.lines:
            event = encoding.event_from_json(value["event"])
        if isinstance(event, Arrived):
            self._known.update((s.seq, s) for s in event.samples)
        begun = value.get("begun")
        trace.lines.append(
            Line(
                number=number,
                time=value["t"],
                event=event,
                ids=encoding.ids_from_json(value.get("event")),
                commands=self._commands(value["do"]),
                begun=None if begun is None else self._commands(begun),
                state=value.get("state"),
                why=value.get("why"),
            )
        )

    def _commands(self, values: Any) -> tuple[Command, ...]:
        if not isinstance(values, list):
            raise ValueError(f"{values!r} is no list")
        return tuple(encoding.command_from_json(value, self._known) for value in values)

    def _fail(self, line: int, problem: str) -> NoReturn:
        raise TraceError(self._path, line, problem)
