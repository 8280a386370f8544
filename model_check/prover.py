"""Proves obligations about the protocol's functions, and keeps itself honest about it.

An obligation is a function of a `Source` of values. The source gives symbolic integers to prove it
for all values, or plain ones to replay a model that the solver found: the same code serves both.
For each obligation the prover checks, with the functions that the loader runs:

- its assumptions can hold: the solver gives a witness, and replayed on plain integers the claim is
  true of it;
- on every path through the functions the claim follows;
- the paths cover everything that is assumed, and no two of them overlap.

Only if all of that is settled the verdict is PROVED. A counterexample is REFUTED if it is one on
plain integers, too. Anything else is UNKNOWN.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from itertools import combinations
from typing import Any

import z3

from model_check.paths import Engine, Path
from model_check.symbolic import SymBool, SymInt, SymReal, bool_term


class Proof(Enum):
    """What the prover found."""

    PROVED = "proved"
    REFUTED = "refuted"
    UNKNOWN = "unknown"


Values = dict[str, "int | Fraction"]
"""Plain values by name."""


class Source:
    """Gives an obligation its values by name, and collects what it assumes of them."""

    def __init__(self, model: Values | None = None) -> None:
        self._model = model
        self.names: list[str] = []
        self.reals: list[str] = []
        self.assumptions: list[Any] = []

    def int(self, name: str) -> Any:
        """An integer: any, or that of the model. (Typed Any, as it stands for both.)"""
        if name not in self.names:
            self.names.append(name)
        if self._model is None:
            return SymInt(z3.Int(name))
        return self._model.get(name, 0)

    def real(self, name: str) -> Any:
        """A rational number: any, or that of the model. Replayed exactly, as a Fraction."""
        if name not in self.reals:
            self.reals.append(name)
        if self._model is None:
            return SymReal(z3.Real(name))
        return Fraction(self._model.get(name, 0))

    def assume(self, condition: Any) -> None:
        """Only values for which this holds are of interest."""
        self.assumptions.append(condition)

    def terms(self) -> list[z3.BoolRef]:
        """The assumptions for the solver."""
        return [bool_term(condition) for condition in self.assumptions]


Claim = Callable[[], Any]
"""Runs the functions and says whether the claim holds of what they did. It may raise: then the
claim does not hold."""

Body = Callable[[Source, Any], Claim]
"""Takes values from the source, assumes, and returns the claim. The second argument holds the
functions it is about, so that a mutant can take their place."""


@dataclass(frozen=True)
class Obligation:
    """Something to prove. says: in plain English. subject: the functions it is about. mutants: by
    name, subjects with one function changed, which must be refuted."""

    name: str
    says: str
    body: Body
    subject: Any
    mutants: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Condition:
    """A verification condition in SMT-LIB, for another solver to answer. `expected`: "unsat" for
    what must be impossible, "sat" for what must be possible."""

    name: str
    smtlib: str
    expected: str


@dataclass
class ProofResult:
    """What became of an obligation. witness: values for which the assumptions hold.
    counterexample: values for which the claim is false. why: the reason for UNKNOWN."""

    obligation: Obligation
    proof: Proof
    paths: int = 0
    seconds: float = 0.0
    witness: Values = field(default_factory=dict)
    counterexample: Values | None = None
    why: str = ""
    conditions: list[Condition] = field(default_factory=list)


class _Unsettled(Exception):
    """The prover cannot say; the message says why."""


@dataclass(frozen=True)
class Prover:
    """How to prove. timeout_ms: of each question to the solver."""

    engine: Engine
    timeout_ms: int = 20_000

    def prove(self, obligation: Obligation, subject: Any = None) -> ProofResult:
        """Prove an obligation about its functions, or about others in their place."""
        began = time.perf_counter()
        result = ProofResult(obligation, Proof.UNKNOWN)
        about = obligation.subject if subject is None else subject
        try:
            result.proof = self._settle(obligation, about, result)
        except _Unsettled as reason:
            result.proof, result.why = Proof.UNKNOWN, str(reason)
        result.seconds = time.perf_counter() - began
        return result

    def _settle(self, obligation: Obligation, subject: Any, result: ProofResult) -> Proof:
        source = Source()
        claim = obligation.body(source, subject)
        assumed = source.terms()
        result.witness = self._witness(obligation, subject, source, assumed, result)
        paths = self.engine.run(claim, assumed)
        result.paths = len(paths.paths)
        if not paths.complete:
            raise _Unsettled(paths.why)
        for number, path in enumerate(paths.paths):
            model = self._ask(f"path {number}", [*assumed, *path.condition, _fails(path)], result)
            if model is not None:
                return self._replay(obligation, subject, source, model, result)
        self._check_cover(assumed, paths.paths, result)
        return Proof.PROVED

    def _witness(
        self,
        obligation: Obligation,
        subject: Any,
        source: Source,
        assumed: Sequence[z3.BoolRef],
        result: ProofResult,
    ) -> Values:
        model = self._ask("witness", assumed, result, expected="sat")
        if model is None:
            raise _Unsettled("the assumptions contradict each other: nothing is proved by them")
        witness = _plain(source, model)
        holds = _on_plain_integers(obligation, subject, witness)
        if holds is None:
            raise _Unsettled(
                f"the witness {witness} does not satisfy the assumptions when replayed"
            )
        return witness

    def _replay(
        self,
        obligation: Obligation,
        subject: Any,
        source: Source,
        model: z3.ModelRef,
        result: ProofResult,
    ) -> Proof:
        values = _plain(source, model)
        if _on_plain_integers(obligation, subject, values) is not False:
            raise _Unsettled(f"the solver's counterexample {values} is none on plain integers")
        result.counterexample = _simplest(obligation, subject, values)
        return Proof.REFUTED

    def _check_cover(
        self, assumed: Sequence[z3.BoolRef], paths: Sequence[Path], result: ProofResult
    ) -> None:
        # (SMT-LIB has no conjunction of nothing.)
        conditions = [z3.And(z3.BoolVal(True), *path.condition) for path in paths]
        uncovered = self._ask(
            "cover", [*assumed, z3.Not(z3.Or(z3.BoolVal(False), *conditions))], result
        )
        if uncovered is not None:
            raise _Unsettled(f"no path covers {uncovered}")
        for a, b in combinations(conditions, 2):
            if self._ask("", [*assumed, a, b], None) is not None:
                raise _Unsettled("two paths overlap: the function is not deterministic")

    def _ask(
        self,
        name: str,
        terms: Sequence[z3.BoolRef],
        result: ProofResult | None,
        expected: str = "unsat",
    ) -> z3.ModelRef | None:
        """A model of the terms, None if there is none; keeps the question for other solvers."""
        solver = z3.Solver()
        solver.set("timeout", self.timeout_ms)
        solver.add(*terms)
        if result is not None:
            result.conditions.append(Condition(name, solver.to_smt2(), expected))
        answer = solver.check()
        if answer == z3.unknown:
            raise _Unsettled(f"{name}: the solver says unknown ({solver.reason_unknown()})")
        return solver.model() if answer == z3.sat else None


def _fails(path: Path) -> z3.BoolRef:
    """That the claim is false on a path. (Its value was computed on that path.)"""
    if path.error is not None:
        return z3.BoolVal(True)
    return z3.Not(bool_term(path.value))


def _plain(source: Source, model: z3.ModelRef) -> Values:
    values: Values = {}
    for name in source.names:
        value = model.eval(z3.Int(name), model_completion=True)
        assert isinstance(value, z3.IntNumRef)
        values[name] = int(value.as_long())
    for name in source.reals:
        value = model.eval(z3.Real(name), model_completion=True)
        if not isinstance(value, z3.RatNumRef):
            raise _Unsettled(f"the solver gives {name} the irrational value {value}")
        values[name] = Fraction(value.numerator_as_long(), value.denominator_as_long())
    return values


def _on_plain_integers(obligation: Obligation, subject: Any, values: Values) -> bool | None:
    """Whether the claim holds of plain integers; None if they do not satisfy the assumptions."""
    source = Source(values)
    claim = obligation.body(source, subject)
    if not all(map(bool, source.assumptions)):
        return None
    try:
        return bool(claim())
    except Exception:
        return False


def _simplest(obligation: Obligation, subject: Any, values: Values) -> Values:
    """The counterexample with as many values as possible replaced by 0 or 1: the rest matters."""
    simple = dict(values)
    for name in simple:
        for easy in (0, 1):
            attempt: Values = {**simple, name: easy}
            still_false = _on_plain_integers(obligation, subject, attempt) is False
            if still_false:
                simple = attempt
                break
    return simple


def implies(condition: Any, consequence: Any) -> Any:
    """If the one, then the other; of symbolic or plain truth values."""
    if isinstance(condition, SymBool) or isinstance(consequence, SymBool):
        return SymBool(z3.Implies(bool_term(condition), bool_term(consequence)))
    return (not condition) or bool(consequence)


def both(*conditions: Any) -> Any:
    """All of them; of symbolic or plain truth values."""
    if any(isinstance(condition, SymBool) for condition in conditions):
        return SymBool(z3.And([bool_term(condition) for condition in conditions]))
    return all(conditions)


def either(*conditions: Any) -> Any:
    """One of them at least; of symbolic or plain truth values."""
    if any(isinstance(condition, SymBool) for condition in conditions):
        return SymBool(z3.Or([bool_term(condition) for condition in conditions]))
    return any(conditions)
