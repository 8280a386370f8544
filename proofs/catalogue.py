"""All theorems, and what is checked in other ways only."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from proofs import agreement, budget, endings, exchange, gradient, quota, splitting, window
from proofs.theorem import Theorem

THEOREMS: tuple[tuple[Theorem, ModuleType], ...] = (
    (exchange.THEOREM, exchange),
    (agreement.AGREEMENT, agreement),
    (agreement.ENVELOPE, agreement),
    (splitting.THEOREM, splitting),
    (budget.THEOREM, budget),
    (window.THEOREM, window),
    (gradient.THEOREM, gradient),
    (quota.THEOREM, quota),
    (endings.THEOREM, endings),
)
"""Every theorem, with the module that its claims are written in."""

NOT_PROVED: Mapping[str, str] = {
    "identity-coverage": "explored and tested on real ranks; no inductive ledger yet",
    "bounded-termination": "explored, the bound is reached; no ranking function over rounds yet",
    "bounded-delay": "explored, the bound is reached; the age argument is not proved yet",
    "deadlock-freedom": "explored; not proved for every number of ranks yet",
    "epochs-apart": "explored; that terms are compared is part of step-alignment",
}
"""Promises without a theorem, and what there is instead."""
