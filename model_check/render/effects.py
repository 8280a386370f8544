"""What an action changes on a rank, read off the rank before and after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from model_check.render import words
from spec.messages import Command, PostCounts, PostReport, ShareReason, ShareSpare
from spec.rank import Input, Phase, RankState, Trainer, held
from spec.samples import Sample
from spec.world import Activity, Node, Outbox, World


class Kind(Enum):
    """What sort of effect it is."""

    NOTE = "something changes on the rank"
    POST = "the rank enters an exchange"
    LOSS = "something goes missing, or is there twice"


class Effect(NamedTuple):
    """What becomes of a rank, as the rest of a sentence that begins with its name."""

    rank: int
    text: str
    kind: Kind = Kind.NOTE


def effects(world: World, rank: int, before: Node, after: Node) -> tuple[Effect, ...]:
    """Everything worth telling that differs on a rank."""
    if before.machine.place.epoch != after.machine.place.epoch:
        return tuple(_new_epoch(rank, before))
    if before == after or not after.alive:
        return ()
    found = [
        *_arrivals(before, after),
        *_decision(before, after),
        *_window(before, after),
        *_ends(world, before, after),
    ]
    told = [Effect(rank, text) for text in found]
    told += [Effect(rank, text, Kind.LOSS) for text in _losses(before, after)]
    told += [Effect(rank, text, Kind.POST) for text in _posts(world, rank, before, after)]
    return tuple(told)


def at_hand(node: Node) -> Command | None:
    """The command that the batcher of a rank has to perform now."""
    return node.commands[0] if node.commands else None


def _new_epoch(rank: int, before: Node) -> Iterator[Effect]:
    left = [*held(before.machine), *(s for step in before.queue for s in step.group)]
    if before.machine.phase is not Phase.ENDED:
        text = f"had not ended epoch {before.machine.place.epoch}: its batcher was still "
        yield Effect(rank, text + before.machine.phase.value, Kind.LOSS)
    if left and before.machine.phase is not Phase.ENDED:
        yield Effect(rank, f"leaves {words.names(s.seq for s in left)} behind", Kind.LOSS)


def _arrivals(before: Node, after: Node) -> Iterator[str]:
    filtered = words.seqs_of(after.filtered & ~before.filtered)
    if filtered:
        yield f"filters {words.names(filtered)}, which cannot be trained on"
    if after.machine.input is Input.FAILED is not before.machine.input:
        yield "reads no more, and will report that it has failed"


# ---------------------------------------------------------------- the round


def _decision(before: Node, after: Node) -> Iterator[str]:
    old, new = before.machine, after.machine
    steps_due = new.place.round > old.place.round and new.phase is not Phase.ENDED
    if new.phase is Phase.TOTALLING is not old.phase:
        yield _aligned(new)
    if steps_due:
        if old.phase is Phase.FILLING:
            yield "decides by itself: it asks no other rank"
        elif old.phase is Phase.REPORTING and not old.waiting:
            yield "leaves the exchange of counts out"
        due = [words.step(step, of_all=True) for step in new.pending]
        if due:
            yield f"has now to hand over {words.listed(due)}"
        if new.waiting != old.waiting and new.waiting:
            waiting = (words.step(step, of_all=True) for step in new.waiting)
            yield f"keeps {words.listed(waiting)} until the block is complete"
    if new.donor is not None and old.donor is None:
        yield f"will idle with a sample that rank {new.donor} lends it"


def _aligned(new: RankState) -> str:
    if not any(new.groups):
        return "has no sample to put in: it will idle"
    steps = "the step" if len(new.groups) == 1 else "the steps"
    return f"fills {steps} with {words.groups(new.groups)}"


def _window(before: Node, after: Node) -> Iterator[str]:
    old, new = before.machine, after.machine
    decided = [*old.groups, *(step.group for step in (*old.waiting, *old.pending))]
    back = {s.seq for group in decided for s in group} & {s.seq for s in new.window}
    if back and new.phase is Phase.ENDED:
        yield f"still holds {words.names(back)}"
    elif back and new.phase is not Phase.TOTALLING:
        yield f"takes {words.names(back)} back into its window"
    idle = [step.number for step in new.pending if step.idle]
    were = {step.number for step in old.pending if not step.idle}
    emptied = [number for number in idle if number in were]
    if emptied:
        yield f"makes {words.listed(f'step {n}' for n in emptied)} idle instead"
    if new.phase is Phase.FILLING is not old.phase:
        yield f"is through with the round, and fills its window for round {new.place.round}"


def _posts(world: World, rank: int, before: Node, after: Node) -> Iterator[str]:
    command = at_hand(after)
    if command == at_hand(before):
        return
    match command:
        case PostReport(tally):
            yield _report(world, after.machine, tally.want)
        case ShareSpare(donor) if donor == rank:
            yield "offers its spare sample to the ranks that have none"
        case PostCounts(counts):
            steps = words.many(len(counts), "step")
            yield f"posts how many samples it has for {steps}"
        case ShareSpare(donor):
            yield f"waits for rank {donor} to lend its spare sample"
        case ShareReason(failed) if failed == rank:
            yield "tells the other ranks why it failed"
        case ShareReason(failed):
            yield f"waits for rank {failed} to say why it failed"
        case _:
            pass


def _report(world: World, machine: RankState, want: int) -> str:
    number = f"its report of round {machine.place.round}"
    if machine.input is Input.FAILED:
        return f"posts {number}: it has failed"
    if machine.trainer is Trainer.STOPPED:
        return f"posts {number}: its trainer has stopped"
    if not machine.groups:
        holds = (
            f", and holds {words.names(s.seq for s in machine.window)}" if machine.window else ""
        )
        return f"posts {number}: it wants no step{holds}"
    total = sum(map(len, machine.groups))
    full = total == world.rules.fill_target(world.config, machine.place.round)
    why = "has a full window, " if full else ""
    formed = f"{why}forms {words.many(want, 'group')} {words.groups(machine.groups)}"
    return f"{formed} and posts {number}: it wants {words.many(want, 'step')}"


# ---------------------------------------------------------------- the ends


def _ends(world: World, before: Node, after: Node) -> Iterator[str]:
    if after.machine.trainer is Trainer.RETIRED is not before.machine.trainer:
        yield "is drained: it tells its trainer that its steps are over"
    if after.surrendered and not before.surrendered:
        yield "cannot make even an idle step: its trainer ends with an error"
    dropped = words.seqs_of(after.dropped & ~before.dropped)
    if dropped:
        yield f"drops {words.names(dropped)}, which its queue still held"
    if after.outcome is not None and before.outcome is None:
        yield f"ends the epoch: {words.outcome(after.outcome)}"
        if after.outbox is Outbox.OPEN and after.trainer is Activity.READY:
            yield "does not tell its trainer that the epoch has ended"
    stopped = after.trainer is Activity.STOPPED is not before.trainer
    if stopped and after.outbox is not Outbox.CLOSED:
        yield "leaves its queue as it is, and does not tell its batcher"


def places_of(node: Node) -> dict[str, tuple[int, ...]]:
    """Where the samples of a rank are: each place with the numbers of its samples."""
    machine = node.machine
    return {
        "the window": _seqs(machine.window),
        "the groups of the round": _seqs(s for group in machine.groups for s in group),
        "the steps that wait for their block": _seqs(
            s for step in machine.waiting for s in step.group
        ),
        "the steps to hand over": _seqs(s for step in machine.pending for s in step.group),
        "the queue": _seqs(s for step in node.queue for s in step.group),
        "the trainer": words.seqs_of(node.taken),
        "the list of filtered samples": words.seqs_of(node.filtered),
        "the steps dropped from the queue": words.seqs_of(node.dropped),
    }


def _seqs(samples: Iterator[Sample] | tuple[Sample, ...]) -> tuple[int, ...]:
    return tuple(s.seq for s in samples)


def lost(node: Node) -> set[int]:
    """The samples that have arrived on a rank and are nowhere any more."""
    everywhere = {seq for place in places_of(node).values() for seq in place}
    return set(range(node.machine.arrived)) - everywhere


def doubled(node: Node) -> set[int]:
    """The samples of a rank that are in more than one place, or more than once in one."""
    counts = Counter(seq for place in places_of(node).values() for seq in place)
    return {seq for seq, count in counts.items() if count > 1}


def _losses(before: Node, after: Node) -> Iterator[str]:
    gone = lost(after) - lost(before)
    if gone:
        which = "it is" if len(gone) == 1 else "they are"
        yield (
            f"LOSES {words.names(gone)}: {which} not held, not queued, not delivered, not filtered"
        )
    twice = doubled(after) - doubled(before)
    if twice:
        yield f"now has {words.names(twice)} TWICE"
