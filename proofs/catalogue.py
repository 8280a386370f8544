"""All theorems, and what is checked in other ways only."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from proofs import (
    agreement,
    budget,
    deadlock,
    delay,
    endings,
    exchange,
    gradient,
    ledger,
    partition,
    progress,
    quota,
    splitting,
    window,
)
from proofs.theorem import Theorem

THEOREMS: tuple[tuple[Theorem, ModuleType], ...] = (
    (exchange.THEOREM, exchange),
    (agreement.AGREEMENT, agreement),
    (agreement.ENVELOPE, agreement),
    (splitting.THEOREM, splitting),
    (partition.THEOREM, partition),
    (budget.THEOREM, budget),
    (window.THEOREM, window),
    (quota.THEOREM, quota),
    (ledger.THEOREM, ledger),
    (deadlock.THEOREM, deadlock),
    (progress.TERMINATION, progress),
    (delay.THEOREM, delay),
    (endings.THEOREM, endings),
    (gradient.THEOREM, gradient),
)
"""Every theorem, with the module that its claims are written in."""

NOT_PROVED: Mapping[str, str] = {
    "epochs-apart": "explored; that terms are compared is part of step-alignment",
}
"""Promises without a theorem, and what there is instead."""
