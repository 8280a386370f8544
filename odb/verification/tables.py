"""The tables that `odb verify` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from model_check.explorer import Verdict
from model_check.mutants import MutantResult
from model_check.verify import VerificationResult, by_promise, describe_coverage
from odb.verification.reality import RealFall

STYLES = {Verdict.HOLDS: "green", Verdict.REFUTED: "bold red", Verdict.UNKNOWN: "yellow"}


def verdict_text(verdict: Verdict) -> Text:
    """A verdict in its colour."""
    return Text(verdict.value.upper(), style=STYLES[verdict])


def case_table(result: VerificationResult) -> Table:
    """What was explored, world by world."""
    table = Table(title="explored, every interleaving", caption=_caption(result))
    table.add_column("world")
    for name in ("ranks", "states", "transitions", "depth", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("reduced by")
    table.add_column("verdict")
    for row in result.cases:
        found, reduction = row.exploration, row.case.reduction
        reduced = [n for n in ("symmetry", "ample") if getattr(reduction, n)]
        table.add_row(
            row.case.name,
            str(row.case.world.world_size),
            f"{found.states:,}",
            f"{found.transitions:,}",
            str(found.depth),
            f"{found.seconds:.1f}",
            ", ".join(reduced) or "-",
            verdict_text(row.verdict),
        )
    return table


def _caption(result: VerificationResult) -> str:
    return (
        f"{describe_coverage([row.case for row in result.cases])}. "
        f"{result.states:,} states and {result.transitions:,} transitions in {result.seconds:.0f} s"
    )


def promise_table(result: VerificationResult) -> Table:
    """What became of every promise, over all worlds."""
    table = Table(title="promises")
    table.add_column("promise", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("what was checked")
    for row in by_promise(result):
        table.add_row(row.name, verdict_text(row.verdict), row.statement)
    return table


def goal_line(result: VerificationResult) -> Text:
    """Whether everything happened that had to happen somewhere."""
    if not result.wanted:
        return Text("no goals were asked for: bounds of your own choice may not reach them")
    if result.unmet:
        return Text(f"never happened: {', '.join(result.unmet)}", style="bold red")
    return Text(f"and it did happen somewhere: {', '.join(sorted(result.wanted))}")


def verification_view(result: VerificationResult) -> Group:
    """All of it."""
    return Group(case_table(result), promise_table(result), goal_line(result))


def _really(row: RealFall | None) -> Text:
    if row is None or row.promise is None:
        return Text("SURVIVED", style="bold red")
    note = " *" if row.difference is not None else ""
    return Text(row.promise + note, style="green" if row.as_expected else "bold red")


def mutant_table(results: Sequence[MutantResult], real: Sequence[RealFall] = ()) -> Table:
    """Which promise each variant breaks, and by how short a run; and in the real loader, if it was
    taken through these runs."""
    really = {row.name: row for row in real}
    fallen = sum(result.as_expected for result in results)
    table = Table(
        title="protocols that must fall",
        caption=f"{fallen} of {len(results)} fell; actions: of a shortest run that shows it"
        + (f"; {sum(row.as_expected for row in real)} fell in the real loader" if real else "")
        + ("; * by another run" if any(row.difference for row in real) else ""),
    )
    table.add_column("variant", no_wrap=True)
    table.add_column("what is changed")
    table.add_column("promise that falls", no_wrap=True)
    table.add_column("actions", justify="right")
    if real:
        table.add_column("in the real loader", no_wrap=True)
    for result in results:
        fall = result.fall
        if fall is None:
            promise, length = Text("SURVIVED", style="bold red"), "-"
        else:
            style = "green" if result.as_expected else "bold red"
            promise = Text(fall.violation.promise, style=style)
            length = str(len(fall.violation.actions))
        in_reality = [_really(really.get(result.name))] if real else []
        table.add_row(result.name, result.variant.description, promise, length, *in_reality)
    return table
