"""Shows what bounded model checking with Z3 finds, for `odb verify --bounded`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from model_check.bounded import LARGE, SMALL, Comparison, Scope, check, comparable, compare, scopes
from model_check.prover import Proof, ProofResult
from odb.verification.theorems import STYLES, readable

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Bounded:
    """What was found: by scope for the shipped protocol, and for each variant."""

    scopes: list[tuple[Scope, ProofResult]]
    variants: list[Comparison]

    @property
    def good(self) -> bool:
        """Whether every scope is proved, and Z3 and the explorer agree about every variant."""
        proved = all(found.proof is Proof.PROVED for _, found in self.scopes)
        return proved and all(row.agree for row in self.variants)


def run_bounded(console: Console, *, large: bool, variants: bool, jobs: int) -> Bounded:
    """Unroll every scope (large: also those that take a minute), and the variants if asked for."""
    wanted = scopes(LARGE if large else SMALL)
    names = list(comparable()) if variants else []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("unrolling epochs", total=len(wanted) + len(names))
        done: list[ProofResult] = []
        for result in _each(check, wanted, jobs):
            done.append(result)
            progress.advance(task)
        progress.update(task, description="unrolling variants")
        compared: list[Comparison] = []
        for row in _each(compare, names, jobs):
            compared.append(row)
            progress.advance(task)
    return Bounded(list(zip(wanted, done, strict=True)), compared)


def _each(function: Callable[[T], R], items: Sequence[T], jobs: int) -> Iterator[R]:
    if jobs == 1 or not items:
        yield from map(function, items)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(function, items)


def bounded_view(found: Bounded) -> Group:
    """What was unrolled, and which variants fall."""
    caption = "for all costs, token budgets, quotas, and numbers of samples up to the bound"
    table = Table(title="whole epochs, unrolled with Z3", caption=caption)
    table.add_column("epochs", no_wrap=True)
    for name in ("ranks", "samples each", "paths", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for scope, result in found.scopes:
        table.add_row(
            scope.name,
            str(scope.ranks),
            f"up to {scope.samples}",
            f"{result.paths:,}",
            f"{result.seconds:.1f}",
            _verdict(result),
        )
    return Group(table, *([_variants(found)] if found.variants else []))


def _verdict(result: ProofResult) -> Text:
    text = Text(result.proof.value.upper(), style=STYLES[result.proof])
    if result.counterexample is not None:
        text.append(f" {', '.join(result.broken)}: {readable(result.counterexample)}")
    elif result.why:
        text.append(f" {result.why}")
    return text


def _variants(found: Bounded) -> Table:
    table = Table(
        title="changed protocols: Z3 and the explorer",
        caption="the explorer's worlds without faults, stops and second epochs, which are not here",
    )
    for name in ("variant", "Z3", "explorer", "values that show it"):
        table.add_column(name)
    for row in found.variants:
        style = None if row.agree else "bold red"
        table.add_row(
            row.name,
            ", ".join(row.found.broken) if row.found is not None else "-",
            row.explorer or "-",
            readable(row.found.counterexample or {}) if row.found is not None else "",
            style=style,
        )
    return table


def as_json(found: Bounded) -> dict[str, Any]:
    """The same for other programs."""
    return {
        "verdict": "proved" if found.good else "not proved",
        "scopes": [
            {
                "name": scope.name,
                "ranks": scope.ranks,
                "samples": scope.samples,
                "window": scope.window,
                "verdict": result.proof.value,
                "paths": result.paths,
                "seconds": result.seconds,
                "broken": list(result.broken),
                "counterexample": readable(result.counterexample or {}),
                "why": result.why,
            }
            for scope, result in found.scopes
        ],
        "variants": [
            {
                "name": row.name,
                "z3": list(row.found.broken) if row.found is not None else None,
                "explorer": row.explorer,
                "agree": row.agree,
            }
            for row in found.variants
        ],
    }
