"""Shows what the reductions of the search save, and that they agree with the unreduced search."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from model_check.explorer import Limits, Verdict
from model_check.profiles import for_mutants
from model_check.reductions import ReductionRow, compare
from odb.verification.run import Request


def compare_reductions(request: Request, console: Console) -> list[ReductionRow]:
    """Explore the worlds of a request (for the profiles: the small ones in which variants fall)
    under every combination of reductions."""
    cases = for_mutants() if request.bounds is None else request.cases
    limits = Limits(request.max_states, request.max_seconds)
    rows = []
    with Progress(console=console, transient=True) as progress:
        for case in progress.track(cases, description="reductions"):
            rows.append(compare(case.name, case.world, limits))
    return rows


def reduction_view(rows: Sequence[ReductionRow]) -> Table:
    """States of each search; factors against the search without reductions."""
    table = Table(title="states with and without reductions")
    table.add_column("world")
    for name in ("none", "symmetry", "ample", "both"):
        table.add_column(name, justify="right")
    table.add_column("agree")
    for row in rows:
        cells = [
            f"{search.states:,}"
            + ("" if search.reduction == "none" else f" ({row.factor(search.reduction):.1f}x)")
            for search in row.searches
        ]
        table.add_row(row.case, *cells, "yes" if settled(row) else "[bold red]NO")
    return table


def settled(row: ReductionRow) -> bool:
    """Whether all searches of a world were exhaustive, and agree."""
    return row.agree and all(s.verdict is not Verdict.UNKNOWN for s in row.searches)


def as_json(rows: Sequence[ReductionRow]) -> list[dict[str, object]]:
    """The same for other programs."""
    return [
        {
            "world": row.case,
            "agree": settled(row),
            "searches": [
                {
                    "reduction": search.reduction,
                    "verdict": search.verdict.value,
                    "states": search.states,
                    "transitions": search.transitions,
                    "seconds": search.seconds,
                }
                for search in row.searches
            ],
        }
        for row in rows
    ]
