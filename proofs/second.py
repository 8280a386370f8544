"""A second opinion: another solver answers the same questions, from their SMT-LIB text alone."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from model_check.prover import Condition


@dataclass(frozen=True)
class Opinion:
    """What the second solver says of a condition: "sat", "unsat" or "unknown"."""

    condition: Condition
    answer: str

    @property
    def agrees(self) -> bool:
        """Whether it is what the first solver said. "unknown" is no agreement."""
        return self.answer == self.condition.expected


def cvc5_is_there() -> bool:
    """Whether the package `cvc5` is installed."""
    try:
        importlib.import_module("cvc5")
    except ImportError:
        return False
    return True


def ask_cvc5(condition: Condition, seconds: float = 60.0) -> Opinion:
    """Ask cvc5 about a condition."""
    cvc5: Any = importlib.import_module("cvc5")
    solver = cvc5.Solver(cvc5.TermManager())
    solver.setOption("tlimit-per", str(int(1000 * seconds)))
    if " Real)" in condition.smtlib:
        # Products of real variables: cylindrical coverings decide them, its default does not.
        solver.setOption("nl-cov", "true")
        solver.setOption("nl-ext", "light")
    parser = cvc5.InputParser(solver)
    parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, _question(condition), condition.name)
    symbols = parser.getSymbolManager()
    answer = "unknown"
    while not (command := parser.nextCommand()).isNull():
        said = str(command.invoke(solver, symbols)).strip()
        if said in ("sat", "unsat", "unknown"):
            answer = said
    return Opinion(condition, answer)


def as_file(condition: Condition) -> str:
    """The SMT-LIB file of a condition, with the answer that is expected."""
    return f"(set-info :status {condition.expected})\n{_question(condition)}"


def _question(condition: Condition) -> str:
    """The same without the answer."""
    body = "\n".join(
        line
        for line in condition.smtlib.splitlines()
        if not line.startswith(("(set-info :status", ";"))
    )
    return f"(set-logic ALL)\n{body}\n"
