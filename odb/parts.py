"""The parts that a loader is built of, so that a test can build one with another part in it.

Whoever starts an epoch asks `parts()` once. They are the shipped ones, unless the thread that asks
is inside `built_of`, which only `odb.testing` uses: to plug in a changed protocol, or an exchange
that completes when a test says so. Nothing else in a process is affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from odb.interpreter import Interpreter
from odb.observer import Observer
from odb.outbox import Outbox
from odb.session import Session
from odb.transport import connect
from spec.rank import Rules, Setup
from spec.world import SHIPPED

Watching = Callable[[Observer, Setup, Outbox[Any]], Observer]
"""Puts an observer before another one, for an epoch with this setup and this outbox."""


def watched_by_nobody_else(inner: Observer, setup: Setup, outbox: Outbox[Any]) -> Observer:
    """The shipped choice."""
    return inner


@dataclass(frozen=True)
class Parts:
    """rules: those of the protocol. interpreter: runs the state machine. outbox: the queue to the
    trainer. session: the life of epochs. connect: makes the exchange. watching: one more observer.
    """

    rules: Rules = SHIPPED
    interpreter: type[Interpreter] = Interpreter
    outbox: type[Outbox[Any]] = Outbox
    session: type[Session] = Session
    connect: Callable[..., Any] = connect
    watching: Watching = watched_by_nobody_else


_SHIPPED = Parts()
_CHOSEN: ContextVar[Parts | None] = ContextVar("odb_parts", default=None)


def parts() -> Parts:
    """The parts for what is built in this thread now."""
    return _CHOSEN.get() or _SHIPPED


@contextmanager
def built_of(chosen: Parts) -> Iterator[None]:
    """Loaders of this thread open their exchange and begin epochs with these parts meanwhile."""
    token = _CHOSEN.set(chosen)
    try:
        yield
    finally:
        _CHOSEN.reset(token)
