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
from typing import Any

import z3

from model_check.disjoint import not_apart
from model_check.paths import Engine, Path, Paths
from model_check.symbolic import NeedsConcrete, SymBool, SymInt, SymReal, bool_term


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


class Outside(Enum):
    """What a claim returns for values that it is not about."""

    OUTSIDE = "not what the claim is about"

    def __bool__(self) -> bool:
        return True


OUTSIDE = Outside.OUTSIDE
"""For claims whose assumptions are themselves computed by running something. On some path at least
the claim has to be about the values, and the witness is taken from there."""

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
    counterexample: values for which the claim is false; broken: which parts of it are, if it has
    any. why: the reason for UNKNOWN."""

    obligation: Obligation
    proof: Proof
    paths: int = 0
    seconds: float = 0.0
    witness: Values = field(default_factory=dict)
    counterexample: Values | None = None
    broken: tuple[str, ...] = ()
    witnessed: bool = False
    why: str = ""
    conditions: list[Condition] = field(default_factory=list)


FEW_PATHS, AT_A_TIME = 40, 200
"""Up to so many paths are asked about one by one, more in questions about so many of them."""


class _Unsettled(Exception):
    """The prover cannot say; the message says why."""


@dataclass(frozen=True)
class Prover:
    """How to prove. timeout_ms: of each question to the solver."""

    engine: Engine
    timeout_ms: int = 20_000

    def prove(self, obligation: Obligation) -> ProofResult:
        """Prove an obligation about its functions."""
        return self._timed(self._settle, obligation, obligation.subject)

    def refute(self, obligation: Obligation, mutant: Any) -> ProofResult:
        """Look for values for which an obligation is false of other functions; stops at the first.
        Not REFUTED means that none were found, and proves nothing."""
        return self._timed(self._search, obligation, mutant)

    def _timed(
        self, settle: Callable[..., Proof], obligation: Obligation, about: Any
    ) -> ProofResult:
        began = time.perf_counter()
        result = ProofResult(obligation, Proof.UNKNOWN)
        try:
            result.proof = settle(obligation, about, result)
        except NeedsConcrete as reason:
            result.proof, result.why = Proof.UNKNOWN, f"cannot be run on symbols: {reason}"
        except _Unsettled as reason:
            result.proof, result.why = Proof.UNKNOWN, str(reason)
        result.seconds = time.perf_counter() - began
        return result

    def _search(self, obligation: Obligation, subject: Any, result: ProofResult) -> Proof:
        source = Source()
        claim = obligation.body(source, subject)
        assumed = source.terms()
        for path in self.engine.paths(claim, assumed, Paths()):
            result.paths += 1
            if path.value is OUTSIDE:
                continue
            model = self._ask("", [*assumed, *path.condition, _fails(path)], None)
            if model is not None:
                return self._replay(obligation, subject, source, model, result)
        raise _Unsettled("no values were found for which the claim is false")

    def _settle(self, obligation: Obligation, subject: Any, result: ProofResult) -> Proof:
        source = Source()
        claim = obligation.body(source, subject)
        assumed = source.terms()
        paths = self.engine.run(claim, assumed)
        result.paths = len(paths.paths)
        if not paths.complete:
            raise _Unsettled(paths.why)
        within = [path for path in paths.paths if path.value is not OUTSIDE]
        if paths.paths and not within:
            raise _Unsettled("the claim is about no values at all: nothing is proved by it")
        there = within[0].condition if len(within) < len(paths.paths) else ()
        result.witness = self._witness(obligation, subject, source, [*assumed, *there], result)
        questions = _questions(within)
        for name, terms in questions:
            model = self._ask(name, [*assumed, *terms], result)
            if model is not None:
                raised = [path.error for path in within if path.error is not None]
                return self._replay(obligation, subject, source, model, result, raised)
        self._check_cover(assumed, paths.paths, result)
        if not result.witnessed:
            raise _Unsettled(
                f"proved, but false of the witness {result.witness} on plain integers: what stands "
                "for plain values does not behave as they do"
            )
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
        result.witnessed = holds
        return witness

    def _replay(
        self,
        obligation: Obligation,
        subject: Any,
        source: Source,
        model: z3.ModelRef,
        result: ProofResult,
        raised: Sequence[Exception] = (),
    ) -> Proof:
        values = _plain(source, model)
        if _on_plain_integers(obligation, subject, values) is not False:
            why = f"; some path raises {raised[0]!r}" if raised else ""
            raise _Unsettled(f"the solver's counterexample {values} is none on plain integers{why}")
        result.counterexample = _simplest(obligation, subject, values)
        result.broken = _broken_parts(obligation, subject, result.counterexample)
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
        for a, b in not_apart(paths):
            if self._ask("", [*assumed, *a.condition, *b.condition], None) is not None:
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


def _questions(paths: Sequence[Path]) -> list[tuple[str, list[z3.BoolRef]]]:
    """What must be impossible: that the claim is false on a path."""
    if len(paths) <= FEW_PATHS:
        return [(f"path {i}", [*p.condition, _fails(p)]) for i, p in enumerate(paths)]
    found = []
    for first in range(0, len(paths), AT_A_TIME):
        some = paths[first : first + AT_A_TIME]
        fails = [z3.And(*p.condition, _fails(p)) for p in some]
        found.append((f"paths {first} to {first + len(some) - 1}", [z3.Or(*fails)]))
    return found


def _fails(path: Path) -> z3.BoolRef:
    """That the claim is false on a path. (Its value was computed on that path.)"""
    if path.error is not None:
        return z3.BoolVal(True)
    value = path.value.whole if isinstance(path.value, Parts) else path.value
    return z3.Not(bool_term(value))


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


def _broken_parts(obligation: Obligation, subject: Any, values: Values) -> tuple[str, ...]:
    try:
        found = obligation.body(Source(values), subject)()
    except Exception as error:
        return (f"raises {type(error).__name__}: {error}",)
    return found.broken if isinstance(found, Parts) else ()


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


class Parts:
    """A claim of several parts, each with a name: all must hold."""

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    @property
    def whole(self) -> Any:
        """All of them."""
        return both(*self.parts.values())

    @property
    def broken(self) -> tuple[str, ...]:
        """The names of those that do not hold, of plain values."""
        return tuple(name.replace("_", "-") for name, part in self.parts.items() if not part)

    def __bool__(self) -> bool:
        return bool(self.whole)


def implies(condition: Any, consequence: Any) -> Any:
    """If the one, then the other; of symbolic or plain truth values."""
    if isinstance(condition, SymBool) or isinstance(consequence, SymBool):
        return SymBool(z3.Implies(bool_term(condition), bool_term(consequence)))
    return (not condition) or bool(consequence)


def negation(condition: Any) -> Any:
    """That it is not so; of a symbolic or plain truth value."""
    return ~condition if isinstance(condition, SymBool) else not condition


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
