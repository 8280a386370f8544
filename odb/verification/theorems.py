"""Shows what is proved, for `odb verify --proofs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from model_check.prover import Proof, Values
from proofs.catalogue import NOT_PROVED, THEOREMS
from proofs.check import CheckedTheorem, check_all

STYLES = {Proof.PROVED: "green", Proof.REFUTED: "bold red", Proof.UNKNOWN: "yellow"}


def run_proofs(
    console: Console, *, second: bool | None = None, jobs: int = 1
) -> list[CheckedTheorem]:
    """Check every theorem. second: whether to ask cvc5 as well (default: if it is installed).
    jobs: processes."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        obligations = sum(len(theorem.obligations) for theorem, _ in THEOREMS)
        task = progress.add_task("proving", total=obligations)

        def on_obligation(theorem: str) -> None:
            progress.update(task, description=f"proving {theorem}", advance=1)

        return check_all(on_obligation, second=second, jobs=jobs)


def proof_view(results: Sequence[CheckedTheorem]) -> Group:
    """Theorem by theorem; then what is wrong, and what is not proved at all."""
    asked = any(checked.opinions for result in results for checked in result.checked)
    table = Table(title="theorems, for any number of ranks", caption=_caption(asked))
    table.add_column("theorem", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name in ("obligations", "paths", "mutants refuted", "cvc5 agrees", "seconds"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(*_row(result))
    return Group(table, *_problems(results), _unproved())


def _caption(asked: bool) -> str:
    second = "cvc5 answered each question again" if asked else "z3 alone was asked"
    return f"each with a witness for its assumptions; paths cover them and do not overlap; {second}"


def _row(result: CheckedTheorem) -> tuple[Any, ...]:
    mutants = [m for checked in result.checked for m in checked.mutants.values()]
    opinions = [o for checked in result.checked for o in checked.opinions]
    refuted = sum(m.proof is Proof.REFUTED for m in mutants)
    agreed = sum(o.agrees for o in opinions)
    return (
        result.theorem.promise,
        Text(result.proof.value.upper(), style=STYLES[result.proof]),
        str(len(result.checked)),
        str(result.paths),
        f"{refuted} of {len(mutants)}",
        f"{agreed} of {len(opinions)}" if opinions else "-",
        f"{result.seconds:.1f}",
    )


def _problems(results: Sequence[CheckedTheorem]) -> list[Text]:
    lines = []
    for result in results:
        for checked in result.checked:
            name = f"{result.theorem.promise}, {checked.result.obligation.name}"
            if checked.result.counterexample is not None:
                values = readable(checked.result.counterexample)
                broken = f" (broken: {', '.join(b)})" if (b := checked.result.broken) else ""
                lines.append(Text(f"{name}: false for {values}{broken}", style="bold red"))
            elif checked.result.why:
                lines.append(Text(f"{name}: unknown, {checked.result.why}", style="yellow"))
            for mutant, found in checked.mutants.items():
                if found.proof is not Proof.REFUTED:
                    lines.append(Text(f"{name}: the mutant {mutant!r} survives", style="bold red"))
            lines += [
                Text(f"{name}, {o.condition.name}: cvc5 says {o.answer}", style="bold red")
                for o in checked.opinions
                if not o.agrees
            ]
    return lines


def _unproved() -> Table:
    table = Table(title="not proved", show_header=False)
    for name, instead in NOT_PROVED.items():
        table.add_row(name, instead)
    return table


def readable(values: Values) -> str:
    """A counterexample without its zeros."""
    shown = [f"{name} = {value}" for name, value in values.items() if value]
    return ", ".join(shown) or "all values 0"


def explain_theorems(promise: str) -> str:
    """What is proved of a promise: statement, assumptions, reasoning, and what is left out."""
    parts = []
    for theorem, _ in THEOREMS:
        if theorem.promise == promise:
            parts.append(
                f"Proved for any number of ranks: {theorem.states}\n\nAssumes: {theorem.assumes}"
                f"\n\nWhy: {theorem.reasoning}\n\nLeft out: {theorem.leaves_out}"
            )
    return "\n\n".join(parts) or f"Not proved: {NOT_PROVED.get(promise, 'no theorem')}."


def as_json(results: Sequence[CheckedTheorem]) -> list[dict[str, Any]]:
    """The same for other programs."""
    return [
        {
            "promise": result.theorem.promise,
            "verdict": result.proof.value,
            "states": result.theorem.states,
            "assumes": result.theorem.assumes,
            "leaves_out": result.theorem.leaves_out,
            "seconds": result.seconds,
            "obligations": [
                {
                    "name": checked.result.obligation.name,
                    "says": checked.result.obligation.says,
                    "verdict": checked.proof.value,
                    "paths": checked.result.paths,
                    "witness": {k: str(v) for k, v in checked.result.witness.items() if v},
                    "mutants": {
                        name: {
                            "verdict": mutant.proof.value,
                            "counterexample": readable(mutant.counterexample or {}),
                            "broken": list(mutant.broken),
                        }
                        for name, mutant in checked.mutants.items()
                    },
                    "cvc5": [opinion.answer for opinion in checked.opinions],
                }
                for checked in result.checked
            ],
        }
        for result in results
    ]
