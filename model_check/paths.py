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

from model_check.abstract import Row, SeveralGroups, length, stands_for_many
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


def _len(values: Any) -> Any:
    if isinstance(values, SeveralGroups) or _holds_many(values):
        return length(values)
    if isinstance(values, list) and _holds_many(builtins.tuple(values)):
        return length(values)
    return builtins.len(values)


def _holds_many(values: Any) -> bool:
    return isinstance(values, builtins.tuple) and any(map(stands_for_many, values))


def _tuple(*args: Any) -> Any:
    values = builtins.tuple(*args)
    return Row(values) if _holds_many(values) else values


def _range(*args: Any) -> Any:
    if not _has_symbol(args):
        return builtins.range(*args)
    first, stop = args if len(args) == 2 else (0, *args)
    many = z3.simplify(int_term(stop) - int_term(first))
    if not isinstance(many, z3.IntNumRef):
        raise NeedsConcrete("a range of symbolic length: state the theorem about one step of it")
    return [first + i for i in builtins.range(many.as_long())]


def _sorted(values: Iterable[Any], **options: Any) -> Any:
    items = list(values)
    if _holds_many(tuple(items)):
        return items  # in what order they are, nobody can say
    key = options.get("key", lambda item: item)
    symbolic = any(_has_symbol(_parts(key(item))) for item in items)
    if symbolic and len(items) > MOST_SORTED:
        raise NeedsConcrete(
            f"more than {MOST_SORTED} symbolic values cannot be sorted: each order is a path of "
            "its own, so assume their order instead"
        )
    return builtins.sorted(items, **options)  # forks where it compares


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


MOST_SORTED = 4
"""Up to so many symbolic values are sorted."""

MERGED = {
    "max": _extreme("max", lambda best, term: best >= term),
    "min": _extreme("min", lambda best, term: best <= term),
    "all": _all,
    "any": _any,
    "int": _int,
    "sorted": _sorted,
    "len": _len,
    "range": _range,
    "tuple": _tuple,
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


class _Stack:
    """The solver, with what a run has assumed so far on it. The next run has the first of these
    decisions in common with it, and does not tell the solver again."""

    def __init__(self, assumptions: Sequence[z3.BoolRef], timeout_ms: int) -> None:
        self.solver = z3.Solver()
        self.solver.set("timeout", timeout_ms)
        self.solver.add(*assumptions)
        self._decisions: list[bool] = []
        self._common = 0
        self._plain: dict[int, tuple[z3.BoolRef, bool | None]] = {}

    def keep(self, prefix: Sequence[bool]) -> None:
        """Go back to what the decisions so far and those of a prefix have in common."""
        common = 0
        for a, b in zip(self._decisions, prefix, strict=False):
            if a is not b:
                break
            common += 1
        self.solver.pop(len(self._decisions) - common)
        del self._decisions[common:]
        self._common = 0

    def assume(self, term: z3.BoolRef, decision: bool) -> None:
        """A run takes its next decision, to assume this."""
        if self._common < len(self._decisions):
            self._common += 1  # it is on the stack
            return
        self.solver.push()
        self.solver.add(term)
        self._decisions.append(decision)
        self._common += 1

    def plainly(self, term: z3.BoolRef) -> bool | None:
        """Whether a term is true or false whatever was assumed; None if that depends."""
        known = self._plain.get(term.get_id())
        if known is None:
            simple = z3.simplify(term)
            value = True if z3.is_true(simple) else False if z3.is_false(simple) else None
            # The term is kept, so that its number is not given to another one.
            known = self._plain[term.get_id()] = (term, value)
        return known[1]


class _Run:
    """One execution along a prefix of decisions."""

    def __init__(self, stack: _Stack, prefix: Sequence[bool]) -> None:
        self.stack = stack
        self.prefix = prefix
        stack.keep(prefix)
        self.decisions: list[bool] = []
        self.open: list[bool] = []
        self.condition: list[z3.BoolRef] = []

    def branch(self, term: z3.BoolRef) -> bool:
        known = self.stack.plainly(term)
        if known is not None:
            return known
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
        answer = self.stack.solver.check(term)
        if answer == z3.unknown:
            raise _Undecided
        return bool(answer == z3.sat)

    def _assume(self, term: z3.BoolRef) -> None:
        self.condition.append(term)
        self.stack.assume(term, self.decisions[-1])


@dataclass(frozen=True)
class Engine:
    """How to run. modules: where the functions under test live. most_paths: where to give up.
    timeout_ms: of each question to the solver."""

    modules: tuple[ModuleType, ...]
    most_paths: int = 20_000
    timeout_ms: int = 20_000

    def run(self, function: Callable[[], Any], assumptions: Sequence[z3.BoolRef] = ()) -> Paths:
        """Run a function of no arguments (a closure over symbolic values) along every path."""
        found = Paths()
        for path in self.paths(function, assumptions, found):
            found.paths.append(path)
        return found

    def paths(
        self,
        function: Callable[[], Any],
        assumptions: Sequence[z3.BoolRef],
        found: Paths,
    ) -> Iterator[Path]:
        """The same, path by path; what is wrong as a whole is noted in `found`."""
        count = 0
        waiting: list[list[bool]] = [[]]
        stack = _Stack(assumptions, self.timeout_ms)
        while waiting:
            if count >= self.most_paths:
                found.complete, found.why = False, f"more than {self.most_paths} paths"
                return
            prefix = waiting.pop()
            run = _Run(stack, prefix)
            try:
                path = self._along(run, function)
            except _Undecided:
                found.complete, found.why = False, "the solver could not decide a branch"
                return
            if path is not None:
                count += 1
                yield path
            for position in range(len(prefix), len(run.decisions)):
                if run.open[position]:
                    waiting.append([*run.decisions[:position], not run.decisions[position]])

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
