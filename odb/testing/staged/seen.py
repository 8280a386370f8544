"""What can be seen of a staged rank, written as the closed system writes it, to be compared.

The state machine and its commands are the interpreter's; everything else is from outside of it:
what the dataset has yielded, what is in the outbox, what the trainer was given, what the loader's
statistics list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from odb.info import ODBStepInfo
from odb.outbox import Content
from odb.testing.staged.rank import StagedRank
from spec.exchange import decode
from spec.messages import (
    Block,
    Event,
    Lost,
    Outcome,
    PostCounts,
    PostReport,
    Step,
    Tallied,
    Totalled,
)
from spec.samples import Counts, Sample
from spec.world import Node, Outbox, World


def seen(world: World, rank: StagedRank) -> Node:
    """A rank with its surroundings."""
    actor, taken = rank.actor, rank.taken
    assert actor.state is not None
    assert rank.stats is not None
    content = rank.content
    queue = tuple(_step(rank, item.info) for item in content.items)  # type: ignore[attr-defined]
    given = [_seqs(info.sample_ids) for info in taken.steps]
    waiting = _bits([sample.seq for step in queue for sample in step.group])
    put = _bits([sample.seq for step in actor.put for sample in step.group])
    reached = _bits([seq for of_step in given for seq in of_step])
    return Node(
        machine=actor.state,
        commands=actor.commands,
        left=world.samples - len(rank.script.read),
        inbox=_inbox(rank),
        queue=queue,
        outbox=_outbox(content),
        outcome=_anonymous(actor.outcome),
        trainer=taken.activity,
        steps=taken.steps[-1].step + 1 if taken.steps else 0,
        alive=rank.alive,
        surrendered=actor.surrendered,
        taken=reached,
        filtered=_bits(_seqs([entry.sample_id for entry in rank.stats.filtered])),
        dropped=put & ~reached & ~waiting,
        entered=tuple(actor.entered),
        got=sum(info.global_samples for info in taken.steps),
    )


def _outbox(content: Content) -> Outbox:
    if content.closed:
        return Outbox.CLOSED
    if content.cut:
        return Outbox.CUT
    return Outbox.FINISHED if content.finished else Outbox.OPEN


def _inbox(rank: StagedRank) -> Event | None:
    call, command = rank.actor.call, rank.actor.commands[:1]
    if call is None or not call.complete:
        return None
    match command:
        case (PostReport(),):
            return Tallied(decode(call.result))
        case (PostCounts(counts),):
            width = len(Counts._fields)
            totals = (call.result[i * width : (i + 1) * width] for i in range(len(counts)))
            return Totalled(tuple(Counts(*total) for total in totals))
    return None


def _anonymous(outcome: Outcome | None) -> Outcome | None:
    """The closed system does not say which rank was lost."""
    return Lost(None) if isinstance(outcome, Lost) else outcome


def _step(rank: StagedRank, info: ODBStepInfo) -> Step:
    """The step that a delivery was made of, from what the delivery says."""
    group = tuple(Sample(seq, *rank.script.read[seq]) for seq in _seqs(info.sample_ids))
    return Step(
        number=info.step,
        round=info.round,
        group=group,
        local=Counts(info.local_samples, info.local_tokens, info.local_weight),
        total=Counts(info.global_samples, info.global_tokens, info.global_weight),
        block=Block(
            info.block_step,
            info.block_steps,
            Counts(info.block_samples, info.block_tokens, info.block_weight),
        ),
    )


def _seqs(sample_ids: Iterable[Any]) -> list[int]:
    """Where in its dataset each sample comes, as a sharded stream names them."""
    return [position for _, _, position in sample_ids]


def _bits(seqs: list[int]) -> int:
    found = 0
    for seq in seqs:
        found |= 1 << seq
    return found
