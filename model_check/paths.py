"""Runs a function on symbolic values along every path.

Where Python asks a symbolic condition for its truth, the run forks: the function is run again from
the start with the answers so far and one more, until every feasible combination of answers has been
taken. `max`, `min`, `any` and `all` become terms instead of forks.

Solver "unknown" and a limit on paths are never success: see `Paths.complete`.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import z3

from model_check.symbolic import (
    RUNS,
    EngineSignal,
    NeedsConcrete,
    SymBool,
    SymInt,
    bool_term,
    int_term,
)


class _Infeasible(EngineSignal):
    """No input takes this path."""


class _Undecided(EngineSignal):
    """The solver could not tell whether an input takes this path."""


# ---------------------------------------------------------------- builtins that stay terms


def _has_symbol(values: Sequence[Any]) -> bool:
    return any(isinstance(value, SymInt | SymBool) for value in values)


def _extreme(name: str, better: Callable[[z3.ArithRef, z3.ArithRef], z3.BoolRef]) -> Any:
    plain = getattr(builtins, name)

    def extreme(*args: Any, **options: Any) -> Any:
        values = list(args[0]) if len(args) == 1 else list(args)
        if not _has_symbol(values):
            return plain(*args, **options) if len(args) > 1 else plain(values, **options)
        if options:
            raise NeedsConcrete(f"{name} with a key or default is not symbolic")
        best = int_term(values[0])
        for value in values[1:]:
            term = int_term(value)
            best = z3.If(better(best, term), best, term)
        return SymInt(best)

    return extreme


def _all(values: Iterable[Any]) -> Any:
    items = list(values)
    if not _has_symbol(items):
        return builtins.all(items)
    return SymBool(z3.And([bool_term(item) for item in items]))


def _any(values: Iterable[Any]) -> Any:
    items = list(values)
    if not _has_symbol(items):
        return builtins.any(items)
    return SymBool(z3.Or([bool_term(item) for item in items]))


def _int(*args: Any, **options: Any) -> Any:
    if len(args) == 1 and isinstance(args[0], SymBool):
        return SymInt(int_term(args[0]))
    if len(args) == 1 and isinstance(args[0], SymInt):
        return args[0]
    return builtins.int(*args, **options)


def _sorted(values: Iterable[Any], **options: Any) -> Any:
    items = list(values)
    for item in items:
        parts = item if isinstance(item, tuple) else (item,)
        if len(items) > 1 and _has_symbol(parts):
            raise NeedsConcrete("symbolic values cannot be sorted: assume their order instead")
    return builtins.sorted(items, **options)


MERGED = {
    "max": _extreme("max", lambda best, term: best >= term),
    "min": _extreme("min", lambda best, term: best <= term),
    "all": _all,
    "any": _any,
    "int": _int,
    "sorted": _sorted,
}
"""Builtins that the functions under test find in place of Python's."""


@contextlib.contextmanager
def merged_builtins(modules: Iterable[ModuleType]) -> Iterator[None]:
    """While this lasts, functions of these modules find the symbolic `max`, `min`, ... The function
    objects stay the same; only their global names are completed."""
    shadowed = [(module, name) for module in modules for name in MERGED]
    for module, name in shadowed:
        if name in vars(module):
            raise AssertionError(f"{module.__name__} defines {name} itself")
        setattr(module, name, MERGED[name])
    try:
        yield
    finally:
        for module, name in shadowed:
            delattr(module, name)


# ---------------------------------------------------------------- paths


@dataclass(frozen=True)
class Path:
    """One way through a function: the condition on its inputs, and what it returned or raised."""

    condition: tuple[z3.BoolRef, ...]
    value: Any
    error: Exception | None


@dataclass
class Paths:
    """Every way through a function under some assumptions. `complete`: none was given up."""

    paths: list[Path] = field(default_factory=list)
    complete: bool = True
    why: str = ""


class _Run:
    """One execution along a prefix of decisions."""

    def __init__(self, solver: z3.Solver, prefix: Sequence[bool]) -> None:
        self.solver = solver
        self.prefix = prefix
        self.decisions: list[bool] = []
        self.open: list[bool] = []
        self.condition: list[z3.BoolRef] = []

    def branch(self, term: z3.BoolRef) -> bool:
        simple = z3.simplify(term)
        if z3.is_true(simple):
            return True
        if z3.is_false(simple):
            return False
        position = len(self.decisions)
        if position < len(self.prefix):
            taken = self.prefix[position]
            other_open = False
        else:
            can, cannot = self._possible(term), self._possible(z3.Not(term))
            if not can and not cannot:
                raise _Infeasible
            taken, other_open = can, can and cannot
        self.decisions.append(taken)
        self.open.append(other_open)
        self._assume(term if taken else z3.Not(term))
        return taken

    def _possible(self, term: z3.BoolRef) -> bool:
        answer = self.solver.check(term)
        if answer == z3.unknown:
            raise _Undecided
        return bool(answer == z3.sat)

    def _assume(self, term: z3.BoolRef) -> None:
        self.condition.append(term)
        self.solver.add(term)


@dataclass(frozen=True)
class Engine:
    """How to run. modules: where the functions under test live. most_paths: where to give up.
    timeout_ms: of each question to the solver."""

    modules: tuple[ModuleType, ...]
    most_paths: int = 2000
    timeout_ms: int = 20_000

    def run(self, function: Callable[[], Any], assumptions: Sequence[z3.BoolRef] = ()) -> Paths:
        """Run a function of no arguments (a closure over symbolic values) along every path."""
        found = Paths()
        waiting: list[list[bool]] = [[]]
        while waiting:
            if len(found.paths) >= self.most_paths:
                found.complete, found.why = False, f"more than {self.most_paths} paths"
                return found
            prefix = waiting.pop()
            solver = z3.Solver()
            solver.set("timeout", self.timeout_ms)
            solver.add(*assumptions)
            run = _Run(solver, prefix)
            try:
                path = self._along(run, function)
            except _Undecided:
                found.complete, found.why = False, "the solver could not decide a branch"
                return found
            if path is not None:
                found.paths.append(path)
            for position in range(len(prefix), len(run.decisions)):
                if run.open[position]:
                    waiting.append([*run.decisions[:position], not run.decisions[position]])
        return found

    def _along(self, run: _Run, function: Callable[[], Any]) -> Path | None:
        RUNS.append(run)
        try:
            with merged_builtins(self.modules):
                value, error = function(), None
        except _Infeasible:
            return None
        except Exception as raised:
            value, error = None, raised
        finally:
            RUNS.pop()
        return Path(tuple(run.condition), value, error)
