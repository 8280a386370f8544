"""Writes docs/PROOFS.md from the theorems: `python -m proofs.document`. A test compares the two."""

from __future__ import annotations

from pathlib import Path

from model_check.prover import Obligation
from proofs.catalogue import NOT_PROVED, THEOREMS
from proofs.coverage import coverage_table
from proofs.theorem import Theorem

HEAD = """# Proofs

What is proved of the protocol for every number of ranks and samples and every budget, within what
each theorem leaves out (partition and bounded-delay run the grouping itself on few samples only).
Written by `python -m proofs.document` from the code in `proofs/`; a test fails if the two
differ.

`odb verify --proofs` proves all of it again, on the function objects that the loader runs. They
are executed on symbolic integers, along every path; Z3 answers whether a claim can fail on any
of them, and cvc5 (if it is installed) answers the same questions from their SMT-LIB text
(`--smt DIR` writes that). PROVED means: the assumptions can hold (a witness is found and
replayed on plain integers), the claim holds on every path, the paths cover all that is assumed
and do not overlap, every mutant of the functions is refuted by values that a plain run
confirms, and no solver disagrees. A solver that cannot say, or a limit, is UNKNOWN.

How a proof about one or two ranks is one about all: each rank's report merges into a tally, and
the tally of any number of reports is characterised by two facts about each field: it bounds
every rank's value, and it is some rank's value. The exchange theorem proves the two by
induction over `merge`; the others assume them of an arbitrary tally.
"""


def document() -> str:
    """The whole page."""
    coverage = "\n".join(coverage_table())
    parts = [HEAD, coverage, *(_theorem(theorem) for theorem, _ in THEOREMS), _not_proved()]
    return "\n".join(parts)


def _theorem(theorem: Theorem) -> str:
    lines = [
        f"## {theorem.promise}",
        "",
        theorem.states,
        "",
        f"- **Assumes:** {theorem.assumes}",
        f"- **Why it follows:** {theorem.reasoning}",
        f"- **Left out:** {theorem.leaves_out}",
        "",
        "| obligation | says | mutants that must be refuted |",
        "| --- | --- | --- |",
    ]
    families: dict[str, list[Obligation]] = {}
    for obligation in theorem.obligations:
        families.setdefault(obligation.name.partition(" (")[0], []).append(obligation)
    for name, members in families.items():
        mutants = "; ".join(dict.fromkeys(m for member in members for m in member.mutants))
        count = f" ({len(members)} cases)" if len(members) > 1 else ""
        lines.append(f"| {name}{count} | {members[0].says} | {mutants} |")
    return "\n".join([*lines, ""])


def _not_proved() -> str:
    rows = [f"| {name} | {instead} |" for name, instead in NOT_PROVED.items()]
    return "\n".join(
        ["## Not proved", "", "| promise | what there is |", "| --- | --- |", *rows, ""]
    )


if __name__ == "__main__":
    Path("docs/PROOFS.md").write_text(document())
