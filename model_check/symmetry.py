"""Makes ranks interchangeable: replaces every rank's name in a node by one and the same.

The protocol uses the names of ranks in one way only: it compares them with the world size, to see
whether there is such a rank (one that lends a spare, has failed, or has closed). Which one it is,
is reported to people and decides nothing. So states that differ in names alone behave alike, and
a search may keep one of them. What it can no longer see then is *which* rank an error names; the
unreduced search can.
"""

from __future__ import annotations

from dataclasses import replace

from spec.exchange import Tally
from spec.messages import (
    AbortedBy,
    ClosedBy,
    Command,
    Event,
    Outcome,
    PostReport,
    ShareReason,
    ShareSpare,
    Tallied,
)
from spec.world import Node

SOMEONE = 0


def anonymous(node: Node, world_size: int) -> Node:
    """The node with no rank's name in it."""
    donor = None if node.machine.donor is None else SOMEONE
    return node._replace(
        machine=node.machine._replace(donor=donor),
        commands=tuple(_command(command, world_size) for command in node.commands),
        inbox=_event(node.inbox, world_size),
        outcome=_outcome(node.outcome),
    )


def _command(command: Command, world_size: int) -> Command:
    match command:
        case PostReport(tally):
            return PostReport(_tally(tally, world_size))
        case ShareSpare():
            return ShareSpare(SOMEONE)
        case ShareReason():
            return ShareReason(SOMEONE)
        case _:
            return command


def _event(event: Event | None, world_size: int) -> Event | None:
    return Tallied(_tally(event.tally, world_size)) if isinstance(event, Tallied) else event


def _outcome(outcome: Outcome | None) -> Outcome | None:
    if isinstance(outcome, AbortedBy | ClosedBy):
        return replace(outcome, rank=SOMEONE)
    return outcome


def _tally(tally: Tally, world_size: int) -> Tally:
    def someone(rank: int) -> int:
        return SOMEONE if rank < world_size else world_size

    return tally._replace(
        spare_from=someone(tally.spare_from),
        failed_rank=someone(tally.failed_rank),
        closed_rank=someone(tally.closed_rank),
    )
