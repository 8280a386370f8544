"""Where the real loader is known to do something else than the closed system, and which is right.

Both are about a peer that is lost; the loader does more than the model says. An entry that no run
shows any more has to go.
"""

from __future__ import annotations

from typing import Any

from spec.messages import Lost, ShareReason
from spec.rank import Trainer
from spec.world import Action, LosePeer, SeeEnd, State

LOST_WHILE_TELLING = (
    "a rank that loses a peer while ranks tell each other why one of them failed drops its queued "
    "steps, whose gradients could not complete; the model keeps them"
)
LOST_AFTER_RETIRING = (
    "a retired rank (idle stop) that loses a peer before its trainer has taken its last steps "
    "drops these and gives the trainer the error; in the model it drops them and says nothing"
)
KNOWN_DIFFERENCES = (LOST_WHILE_TELLING, LOST_AFTER_RETIRING)

PARTING_VARIANTS = {
    "idle-skips-counts": (
        "the totals that the idle rank makes up have no weight, and the loader divides by that for "
        "the loss scale: it cannot make the idle step, and goes on without it"
    ),
}
"""Variants that fall by the same promise in the real loader, but do something else on the way, by
name, with the reason."""


def known_difference(
    before: State, action: Action, fields: tuple[tuple[str, Any, Any], ...]
) -> str | None:
    """The reason for a difference that an action has brought about, if it is known."""
    names = {name for name, _, _ in fields}
    if isinstance(action, LosePeer) and names <= {"queue", "dropped"}:
        commands = before.nodes[action.rank].commands
        return LOST_WHILE_TELLING if isinstance(commands[0], ShareReason) else None
    if isinstance(action, SeeEnd) and names == {"trainer"}:
        node = before.nodes[action.rank]
        lost = isinstance(node.outcome, Lost) and node.machine.trainer is Trainer.RETIRED
        return LOST_AFTER_RETIRING if lost and node.dropped else None
    return None
