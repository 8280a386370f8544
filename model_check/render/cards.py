"""What a page shows of every rank at every moment of a trace, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from model_check.render import words
from model_check.render.effects import at_hand, lost
from model_check.render.story import doing, trainer_is, waits_of
from model_check.render.trace import Trace
from spec.enabled import COLLECTIVES
from spec.grouping import oversize
from spec.messages import PostCounts, PostReport, ShareReason, ShareSpare, Step
from spec.rank import Input
from spec.samples import Group, Sample
from spec.world import Activity, Deliver, NextEpoch, Node, Outbox, State, World


@dataclass(frozen=True)
class Chip:
    """A sample. over: it exceeds the budget by itself."""

    seq: int
    cost: int
    over: bool


@dataclass(frozen=True)
class Slot:
    """A step with its samples."""

    step: int
    chips: tuple[Chip, ...]


@dataclass(frozen=True)
class Card:
    """A rank at one moment. room: how many samples its window, and how many steps its queue, has
    place for. waits: for whom its batcher and its trainer wait, and why."""

    alive: bool
    doing: str
    place: str
    input: str
    window: tuple[Chip, ...]
    groups: tuple[tuple[Chip, ...], ...]
    waiting: tuple[Slot, ...]
    pending: tuple[Slot, ...]
    queue: tuple[Slot, ...]
    outbox: str
    trainer: str
    delivered: tuple[Chip, ...]
    filtered: tuple[Chip, ...]
    dropped: tuple[Chip, ...]
    lost: tuple[Chip, ...]
    waits: tuple[str, ...]


@dataclass(frozen=True)
class Moment:
    """All ranks at one moment, and who is in a collective."""

    cards: tuple[Card, ...]
    exchange: str
    gradient: str


def moments(trace: Trace) -> tuple[Moment, ...]:
    """Every state of a trace."""
    world = trace.world
    known: list[dict[int, Sample]] = [{} for _ in range(world.world_size)]
    found = []
    for number, state in enumerate(trace.states):
        if number:
            _learn(known, trace.states[number - 1], trace, number - 1)
        cards = tuple(_card(world, state, rank, known[rank]) for rank in range(len(state.nodes)))
        found.append(Moment(cards, _exchange(state), _gradient(state)))
    return tuple(found)


def _learn(known: list[dict[int, Sample]], before: State, trace: Trace, number: int) -> None:
    """Remember what a sample costs, as the logs of a node hold its number only."""
    action = trace.actions[number]
    if isinstance(action, Deliver):
        seq = before.nodes[action.rank].machine.arrived
        known[action.rank][seq] = Sample(seq, action.cost, action.weight)
    elif isinstance(action, NextEpoch):
        known[action.rank].clear()


def _card(world: World, state: State, rank: int, known: dict[int, Sample]) -> Card:
    node = state.nodes[rank]
    machine = node.machine

    def chips(samples: Iterable[Sample]) -> tuple[Chip, ...]:
        return tuple(Chip(s.seq, s.cost, oversize(world.config.budget, s)) for s in samples)

    def logged(seqs: Iterable[int]) -> tuple[Chip, ...]:
        return chips(known[seq] for seq in sorted(seqs))

    def slots(steps: Iterable[Step]) -> tuple[Slot, ...]:
        return tuple(Slot(step.number, chips(step.group)) for step in steps)

    def group(samples: Group) -> tuple[Chip, ...]:
        return chips(samples)

    return Card(
        alive=node.alive,
        doing=doing(world, node),
        place=f"epoch {machine.place.epoch}, round {machine.place.round}",
        input=_input(node),
        window=chips(machine.window),
        groups=tuple(map(group, machine.groups)),
        waiting=slots(machine.waiting),
        pending=slots(machine.pending),
        queue=slots(node.queue),
        outbox=_outbox(node),
        trainer=f"{trainer_is(node)}; {words.many(node.steps, 'step')} taken",
        delivered=logged(words.seqs_of(node.taken)),
        filtered=logged(words.seqs_of(node.filtered)),
        dropped=logged(words.seqs_of(node.dropped)),
        lost=logged(lost(node)) if node.alive else (),
        waits=waits_of(world, state, rank),
    )


def _input(node: Node) -> str:
    read = words.many(node.machine.arrived, "sample")
    if node.machine.input is not Input.OPEN:
        return f"{node.machine.input.value} after {read}"
    return f"{read} read, {f'at most {node.left} more' if node.left else 'no more to come'}"


def _outbox(node: Node) -> str:
    return "" if node.outbox is Outbox.OPEN else str(node.outbox.value)


COLLECTIVE = {
    PostReport: "reports",
    PostCounts: "counts",
    ShareSpare: "a spare sample",
    ShareReason: "the reason of the failure",
}


def _exchange(state: State) -> str:
    inside = []
    for rank, node in enumerate(state.nodes):
        command = at_hand(node)
        if isinstance(command, COLLECTIVES) and node.inbox is None:
            inside.append(f"rank {rank} ({COLLECTIVE[type(command)]})")
    return ", ".join(inside) or "nobody"


def _gradient(state: State) -> str:
    inside = [
        f"rank {rank} (step {node.steps - 1})"
        for rank, node in enumerate(state.nodes)
        if node.alive and node.trainer is Activity.IN_GRADIENT
    ]
    return ", ".join(inside) or "nobody"
