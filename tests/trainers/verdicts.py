"""What the conformance suite found of each framework: kept in files, and printed as one table.

`python -m tests.trainers.verdicts` prints the table of all that were kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

VERDICTS = Path(__file__).parents[2] / "build" / "conformance"


@dataclass(frozen=True)
class Verdict:
    """One case of one framework. naive_difference: of a training with the framework's defaults and
    without the loss scale. problems: empty if it conforms."""

    framework: str
    version: str
    runs_on_cpu: str
    extra_lines: int
    accumulation: int
    dtype: str
    max_difference: float
    naive_difference: float | None
    blocks: int
    optimizer_steps: tuple[int, ...]
    idle_steps: int
    steps_equal: bool
    samples_once: bool
    problems: tuple[str, ...]


class NonconformingError(AssertionError):
    """An adapter does not keep the contract; `verdict.problems` says in what."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(
            f"{verdict.framework}, A={verdict.accumulation}, {verdict.dtype}:\n"
            + "\n".join(verdict.problems)
        )
        self.verdict = verdict


def write_verdicts(framework: str, verdicts: Sequence[Verdict]) -> None:
    """Keep them for the table, in place of the framework's earlier ones."""
    VERDICTS.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(verdict)) + "\n" for verdict in verdicts]
    (VERDICTS / f"{framework.lower().replace(' ', '-')}.jsonl").write_text("".join(lines))


def read_verdicts(folder: Path = VERDICTS) -> list[Verdict]:
    """All that were kept."""
    return [
        Verdict(**json.loads(line))
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


@dataclass(frozen=True)
class Summary:
    """All cases of one framework in one row: the worst of what odb did, and the least of what the
    naive arm did wrong. Numbers as they are printed; "-" where there is none."""

    framework: str
    version: str
    runs_on_cpu: str
    accumulations: str
    off_by: str
    off_by_float32: str
    off_by_float64: str
    steps_equal: bool
    samples_once: bool
    naive: str
    extra_lines: int


def summaries(verdicts: Sequence[Verdict]) -> list[Summary]:
    """One for each framework, in the order in which they come."""
    found = []
    for name in dict.fromkeys(verdict.framework for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.framework == name]
        found.append(
            Summary(
                framework=name,
                version=own[0].version,
                runs_on_cpu=own[0].runs_on_cpu,
                accumulations=", ".join(map(str, sorted({v.accumulation for v in own}))),
                off_by=_number(max, (v.max_difference for v in own)),
                off_by_float32=_worst(own, "float32"),
                off_by_float64=_worst(own, "float64"),
                steps_equal=all(v.steps_equal for v in own),
                samples_once=all(v.samples_once for v in own),
                naive=_number(
                    min, (v.naive_difference for v in own if v.naive_difference is not None)
                ),
                extra_lines=own[0].extra_lines,
            )
        )
    return found


def _worst(verdicts: Sequence[Verdict], dtype: str) -> str:
    return _number(max, (v.max_difference for v in verdicts if v.dtype == dtype))


def _number(choose: Callable[[list[float]], float], values: Iterable[float]) -> str:
    found = list(values)
    return f"{choose(found):.1e}" if found else "-"


def table(verdicts: Sequence[Verdict]) -> str:
    """One row for each framework, in Markdown."""
    rows = [
        "| framework | version | on CPU here | A | largest difference f32 / f64 | steps equal "
        "| samples once | extra lines | naive is off by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows += (
        f"| {row.framework} | {row.version} | {row.runs_on_cpu} | {row.accumulations} "
        f"| {row.off_by_float32} / {row.off_by_float64} "
        f"| {_yes(row.steps_equal)} | {_yes(row.samples_once)} "
        f"| {row.extra_lines} | {row.naive} |"
        for row in summaries(verdicts)
    )
    return "\n".join(rows)


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


if __name__ == "__main__":
    sys.stdout.write(table(read_verdicts()) + "\n")
