"""Finds out the lengths to plan with: in a file, or by measuring a dataset."""

from __future__ import annotations

import csv
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from torch.utils.data import IterableDataset

from odb.costs import CostModel
from odb.errors import ConfigError, CostError, MissingDependencyError
from odb.sharding import sample_error

DEFAULT_FIELD = "length"


@dataclass(frozen=True)
class Origin:
    """Where lengths come from, as the user names it.

    text: a file (.txt, .json, .jsonl, .csv, .parquet), or `module:attribute` for a dataset or a
        function that returns one. field: the JSON field or the column that holds the length.
    cost_fn: for a dataset, `module:function` in place of `odb.default_cost`.
    """

    text: str
    field: str = DEFAULT_FIELD
    cost_fn: str | None = None


@dataclass(frozen=True)
class Lengths:
    """Tokens and loss weight of every sample of a dataset, by index. A file tells no weights, so
    there each sample weighs its length."""

    costs: tuple[int, ...]
    weights: tuple[int, ...]


class _Found(NamedTuple):
    """A value that should be a length, and how to say where it stands."""

    place: str
    value: Any


def read_lengths(origin: Origin, console: Console | None = None) -> Lengths:
    """Read or measure all lengths; measuring a dataset shows its progress on `console`.

    Raises ConfigError that says what is wrong where, SampleError for a sample that cannot be read,
    and MissingDependencyError for a Parquet file without pyarrow.
    """
    path = Path(origin.text)
    if path.suffix in READERS and (path.exists() or ":" not in origin.text):
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file")
        if origin.cost_fn is not None:
            raise ConfigError(f"--cost-fn measures samples, but {path} holds lengths: leave it out")
        costs = tuple(_checked(READERS[path.suffix](path, origin.field), path))
        if not costs:
            raise ConfigError(f"{path} is empty: it must hold at least one length")
        return Lengths(costs, costs)
    if ":" not in origin.text:
        known = ", ".join(READERS)
        raise ConfigError(
            f"{origin.text!r} is neither a file of a known kind ({known}) nor module:dataset"
        )
    return _measure(origin, console or Console(stderr=True))


def _checked(found: Iterable[_Found], path: Path) -> Iterator[int]:
    for place, value in found:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not whole or value < 0:
            raise ConfigError(
                f"{path}, {place}: {value!r} is not a length: write a whole number of 0 or more, "
                "the sample's tokens"
            )
        yield int(value)


# ---------------------------------------------------------------- files


def _from_text(path: Path, field: str) -> Iterator[_Found]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield _Found(f"line {number}", _number(line))


def _from_csv(path: Path, field: str) -> Iterator[_Found]:
    reader = csv.DictReader(_lines(path))
    if reader.fieldnames is None:
        return
    _check_column(path, field, reader.fieldnames)
    for row in reader:
        yield _Found(f"line {reader.line_num}", _number(row[field] or ""))


def _from_json(path: Path, field: str) -> Iterator[_Found]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, list):
        raise ConfigError(f"{path} must hold a list, not a {type(content).__name__}")
    for number, item in enumerate(content, 1):
        yield _Found(f"item {number}", _field_of(item, field, f"{path}, item {number}"))


def _from_json_lines(path: Path, field: str) -> Iterator[_Found]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is not JSON: {error}") from error
        yield _Found(f"line {number}", _field_of(item, field, f"{path}, line {number}"))


def _from_parquet(path: Path, field: str) -> Iterator[_Found]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError(
            "reading a Parquet file needs pyarrow: pip install 'verified-odb[parquet]'"
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error
    with file:
        _check_column(path, field, file.schema_arrow.names)
        number = 0
        for batch in file.iter_batches(columns=[field]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield _Found(f"row {number}", value)


READERS: dict[str, Callable[[Path, str], Iterator[_Found]]] = {
    ".txt": _from_text,
    ".json": _from_json,
    ".jsonl": _from_json_lines,
    ".csv": _from_csv,
    ".parquet": _from_parquet,
}
"""By suffix. Each yields every value that should be a length, in order."""


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8: {error}") from error


def _number(text: str) -> int | str:
    """The whole number that a text stands for, or the text, for the message that refuses it."""
    text = text.strip()
    return int(text) if text.removeprefix("-").isdecimal() else text


def _field_of(item: Any, field: str, where: str) -> Any:
    if not isinstance(item, dict):
        return item
    if field not in item:
        raise ConfigError(
            f"{where} has no field {field!r}, only {sorted(item)}: name the field that holds the "
            "length with --field"
        )
    return item[field]


def _check_column(path: Path, column: str, columns: Iterable[str]) -> None:
    if column not in columns:
        raise ConfigError(
            f"{path} has no column {column!r}, only {sorted(columns)}: name the column that holds "
            "the length with --column"
        )


# ---------------------------------------------------------------- datasets


def _measure(origin: Origin, console: Console) -> Lengths:
    dataset = _attribute(origin.text)
    if callable(dataset) and not hasattr(dataset, "__getitem__"):
        dataset = dataset()
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"{origin.text} is a {type(dataset).__name__}, not a dataset with __len__ and "
            "__getitem__: write its lengths into a file"
        )
    costs = CostModel.of(None if origin.cost_fn is None else _attribute(origin.cost_fn))
    measured = []
    for index in track(range(len(dataset)), "measuring", console=console, transient=True):
        try:
            measured.append(costs.measure(dataset[index]))
        except CostError as error:
            raise ConfigError(f"sample {index} of {origin.text}: {error}") from error
        except Exception as error:
            raise sample_error(index, error) from error
    if not measured:
        raise ConfigError(f"{origin.text} is empty: there is nothing to plan")
    return Lengths(tuple(m.cost for m in measured), tuple(m.weight for m in measured))


def _attribute(text: str) -> Any:
    """What `module:attribute` names. Like `python -m`, it looks in the current folder first."""
    module_name, _, attribute = text.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{text!r} must name a module and something in it: module:attribute")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever a module of the user's raises
        raise ConfigError(
            f"cannot import {module_name!r} for {text}: {type(error).__name__}: {error}"
        ) from error
    for name in attribute.split("."):
        if not hasattr(value, name):
            raise ConfigError(f"{text}: {module_name} has no attribute {attribute!r}")
        value = getattr(value, name)
    return value
