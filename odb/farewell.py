"""What is said to other ranks before this process ends."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
from collections.abc import Callable

_SAID_BY: set[tuple[int, Callable[[], None]]] = set()
"""Processes, this one and those that it was forked from, and what each of them will say."""


def at_exit(say: Callable[[], None]) -> None:
    """Call this before the process ends, once or twice.

    Processes of `multiprocessing` do not run what `atexit` knows, and a forked one does not inherit
    what is registered for its end.
    """
    if (os.getpid(), say) not in _SAID_BY:
        _SAID_BY.add((os.getpid(), say))
        multiprocessing.util.Finalize(None, say, exitpriority=100)
        atexit.register(say)
