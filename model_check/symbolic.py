"""Symbolic integers, reals and truth values over Z3, for ordinary Python functions to run on.

A symbolic value is a term. What cannot be symbolic (a length, a range, a dict key, a sort) raises
and says what to do instead. Where Python asks a symbolic condition for its truth, the run forks
(see `model_check.paths`).
"""

from __future__ import annotations

from typing import Protocol

import z3


class EngineSignal(BaseException):
    """A signal of the engine. Not an Exception, so that no `except Exception` in the code under
    test can swallow it."""


class NeedsConcrete(EngineSignal):
    """The code asked for something that a symbolic value cannot give; the message says what to do
    instead."""


class Brancher(Protocol):
    """What decides which way a run takes at a symbolic condition."""

    def branch(self, term: z3.BoolRef) -> bool:
        """The answer on this path."""


RUNS: list[Brancher] = []
"""The runs in progress, the innermost last."""


def _current() -> Brancher:
    if not RUNS:
        raise NeedsConcrete("a symbolic truth value was asked for outside of a symbolic run")
    return RUNS[-1]


# ---------------------------------------------------------------- values


class SymBool:
    """A symbolic truth value. Asking for its truth forks the run."""

    __slots__ = ("term",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, term: z3.BoolRef) -> None:
        self.term = term

    def __bool__(self) -> bool:
        return _current().branch(self.term)

    def __and__(self, other: object) -> SymBool:
        return SymBool(z3.And(self.term, bool_term(other)))

    def __or__(self, other: object) -> SymBool:
        return SymBool(z3.Or(self.term, bool_term(other)))

    __rand__, __ror__ = __and__, __or__

    def __add__(self, other: object) -> SymInt:
        return SymInt(int_term(self) + int_term(other))

    __radd__ = __add__

    def __invert__(self) -> SymBool:
        return SymBool(z3.Not(self.term))

    def __eq__(self, other: object) -> SymBool:  # type: ignore[override]
        return SymBool(self.term == bool_term(other))

    def __ne__(self, other: object) -> SymBool:  # type: ignore[override]
        return SymBool(self.term != bool_term(other))

    def choose(self, yes: object, no: object) -> SymInt:
        """One of two integers, as a term."""
        return SymInt(z3.If(self.term, int_term(yes), int_term(no)))

    def __int__(self) -> int:
        # `int()` must return an int, so this forks: 1 on one path and 0 on the other.
        return 1 if self else 0

    def __index__(self) -> int:
        return int(self)

    def __repr__(self) -> str:
        return f"SymBool({self.term})"


class SymInt:
    """A symbolic integer."""

    __slots__ = ("term",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, term: z3.ArithRef) -> None:
        self.term = term

    def __add__(self, other: object) -> SymInt:
        return SymInt(self.term + int_term(other))

    def __radd__(self, other: object) -> SymInt:
        return SymInt(int_term(other) + self.term)

    def __sub__(self, other: object) -> SymInt:
        return SymInt(self.term - int_term(other))

    def __rsub__(self, other: object) -> SymInt:
        return SymInt(int_term(other) - self.term)

    def __mul__(self, other: object) -> SymInt:
        return SymInt(self.term * int_term(other))

    def __rmul__(self, other: object) -> SymInt:
        return SymInt(int_term(other) * self.term)

    def __neg__(self) -> SymInt:
        return SymInt(-self.term)

    def __floordiv__(self, other: object) -> SymInt:
        divisor = _positive_divisor(other)
        return SymInt(self.term / divisor)  # for a positive divisor z3 rounds down, as Python does

    def __mod__(self, other: object) -> SymInt:
        divisor = _positive_divisor(other)
        return SymInt(self.term % divisor)

    def __lshift__(self, places: int) -> SymInt:
        return SymInt(self.term * 2**places)

    def __lt__(self, other: object) -> SymBool:
        return SymBool(self.term < int_term(other))

    def __le__(self, other: object) -> SymBool:
        return SymBool(self.term <= int_term(other))

    def __gt__(self, other: object) -> SymBool:
        return SymBool(self.term > int_term(other))

    def __ge__(self, other: object) -> SymBool:
        return SymBool(self.term >= int_term(other))

    def __eq__(self, other: object) -> SymBool:  # type: ignore[override]
        return SymBool(self.term == int_term(other))

    def __ne__(self, other: object) -> SymBool:  # type: ignore[override]
        return SymBool(self.term != int_term(other))

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __index__(self) -> int:
        raise NeedsConcrete(
            "a symbolic integer was used as a length, an index or a range: run the function for "
            "each concrete size, or state the theorem about one step of the loop"
        )

    __int__ = __index__

    def __repr__(self) -> str:
        return f"SymInt({self.term})"


class SymReal:
    """A symbolic real number, for what is proved over the reals."""

    __slots__ = ("term",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, term: z3.ArithRef) -> None:
        self.term = term

    def __add__(self, other: object) -> SymReal:
        return SymReal(self.term + real_term(other))

    def __mul__(self, other: object) -> SymReal:
        return SymReal(self.term * real_term(other))

    def __truediv__(self, other: object) -> SymReal:
        # Division by zero has some value for the solver; assume that the divisor is not zero.
        return SymReal(self.term / real_term(other))

    __radd__, __rmul__ = __add__, __mul__

    def __gt__(self, other: object) -> SymBool:
        return SymBool(self.term > real_term(other))

    def __ge__(self, other: object) -> SymBool:
        return SymBool(self.term >= real_term(other))

    def __eq__(self, other: object) -> SymBool:  # type: ignore[override]
        return SymBool(self.term == real_term(other))

    def __bool__(self) -> bool:
        return bool(SymBool(self.term != 0))

    def __repr__(self) -> str:
        return f"SymReal({self.term})"


def real_term(value: object) -> z3.ArithRef:
    """The term of a symbolic or plain number, as a real."""
    if isinstance(value, SymReal):
        return value.term
    if isinstance(value, SymInt):
        return z3.ToReal(value.term)
    if isinstance(value, int):
        return z3.RealVal(value)
    raise NeedsConcrete(f"a symbolic real met a {type(value).__name__}")


def int_term(value: object) -> z3.ArithRef:
    """The term of a symbolic or concrete integer."""
    if isinstance(value, SymInt):
        return value.term
    if isinstance(value, SymBool):
        return z3.If(value.term, z3.IntVal(1), z3.IntVal(0))
    if isinstance(value, bool | int):
        return z3.IntVal(int(value))
    raise NeedsConcrete(f"a symbolic integer met a {type(value).__name__}")


def bool_term(value: object) -> z3.BoolRef:
    """The term of a symbolic or concrete truth value."""
    if isinstance(value, SymBool):
        return value.term
    if isinstance(value, bool):
        return z3.BoolVal(value)
    if isinstance(value, SymInt):
        return value.term != 0
    raise NeedsConcrete(f"a symbolic truth value met a {type(value).__name__}")


def _positive_divisor(value: object) -> z3.ArithRef:
    if isinstance(value, int) and value > 0:
        return z3.IntVal(value)
    raise NeedsConcrete("division is symbolic only by a positive concrete integer")
