"""What can happen next in the closed system, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from spec.config import Idle
from spec.messages import (
    ClosedBy,
    Emit,
    Finished,
    PostCounts,
    PostReport,
    Pull,
    ShareReason,
    ShareSpare,
)
from spec.rank import Phase
from spec.world import (
    Action,
    Activity,
    BreakGradient,
    Crash,
    Deliver,
    EndInput,
    Exchange,
    FailBatch,
    FailInput,
    Gradient,
    HearOfFailure,
    LosePeer,
    NextEpoch,
    Node,
    NoticeStop,
    Outbox,
    PutStep,
    Receive,
    SeeEnd,
    State,
    StopEarly,
    TakeStep,
    World,
)


class Ambient(NamedTuple):
    """All that a rank's own actions depend on outside its node.

    may_fail, may_stop: whether a fault or a lonely stop is left. stop_after: as in State.
    someone_died: the process of a rank is gone.
    someone_left: so it is, or a rank has given up and so ended its trainer with an error.
    epoch_over: no trainer is busy with an epoch before this number.
    """

    may_fail: bool
    may_stop: bool
    stop_after: int | None
    someone_died: bool
    someone_left: bool
    epoch_over: int


def ambient_of(state: State) -> Ambient:
    """What the ranks' own actions depend on in a state."""
    busy = [_busy_epoch(node) for node in state.nodes if node.alive]
    return Ambient(
        may_fail=state.faults > 0,
        may_stop=state.stops > 0,
        stop_after=state.stop_after,
        someone_died=any(not node.alive for node in state.nodes),
        someone_left=any(not node.alive or node.surrendered for node in state.nodes),
        epoch_over=min(busy, default=0),
    )


def _busy_epoch(node: Node) -> int:
    done = node.trainer in (Activity.DONE, Activity.STOPPED, Activity.FAILED)
    return node.machine.place.epoch + int(done)


COLLECTIVES = (PostReport, PostCounts, ShareSpare, ShareReason)
"""The commands in which all batchers take part."""


def actions(world: World, state: State) -> Iterator[Action]:
    """Everything that can happen next, in a fixed order."""
    ambient = ambient_of(state)
    for rank, node in enumerate(state.nodes):
        yield from local_actions(world, ambient, rank, node)
    yield from meetings(world, state.nodes)


def local_actions(world: World, ambient: Ambient, rank: int, node: Node) -> Iterator[Action]:
    """What a rank can do by itself."""
    if node.alive:
        yield from batcher_actions(world, ambient, rank, node)
        yield from trainer_actions(world, ambient, rank, node)
        if world.faults.crash and ambient.may_fail:
            yield Crash(rank)


def batcher_actions(world: World, ambient: Ambient, rank: int, node: Node) -> Iterator[Action]:
    """What a batcher can do by itself, with its input and its queue."""
    command = node.commands[0] if node.commands else None
    if node.inbox is not None:
        yield Receive(rank)
    elif isinstance(command, Pull | Emit) and node.outbox is Outbox.CLOSED:
        yield NoticeStop(rank)
    elif isinstance(command, Pull):
        if node.left:
            for cost, weight in world.kinds:
                yield Deliver(rank, cost, weight)
        yield EndInput(rank)
        if world.faults.input and ambient.may_fail:
            yield FailInput(rank)
    elif isinstance(command, Emit):
        if world.habits.has_room(node, world.queue):
            yield PutStep(rank)
        if world.faults.batch and ambient.may_fail:
            yield FailBatch(rank)
    hears = node.machine.phase is not Phase.ENDED or isinstance(command, ShareReason)
    if hears and ambient.someone_died:
        # Also where an exchange is complete: its result may not get through to every rank.
        yield LosePeer(rank)


def trainer_actions(world: World, ambient: Ambient, rank: int, node: Node) -> Iterator[Action]:
    """What a trainer can do by itself, with its queue."""
    match node.trainer:
        case Activity.READY if ambient.stop_after == node.steps:
            yield StopEarly(rank)
        case Activity.READY:
            if node.queue:
                yield TakeStep(rank)
            elif node.outbox in (Outbox.FINISHED, Outbox.CUT):
                yield SeeEnd(rank)
            if ambient.may_stop:
                yield StopEarly(rank)
        case Activity.IN_GRADIENT:
            if ambient.someone_left:
                yield BreakGradient(rank)
        case Activity.DONE | Activity.STOPPED:
            following = node.machine.place.epoch + 1
            ended = world.habits.may_begin(node)
            # DDP's `Join` lets nobody out before all are through with the epoch.
            apart = not (world.coupled and world.config.idle is Idle.STOP)
            if ended and following < world.epochs and (apart or ambient.epoch_over >= following):
                good = isinstance(node.outcome, Finished | ClosedBy | None)
                yield NextEpoch(rank) if good else HearOfFailure(rank)


def meetings(world: World, nodes: tuple[Node, ...]) -> Iterator[Exchange | Gradient]:
    """The collectives that can complete: those that every rank is in."""
    if not all(node.alive for node in nodes):
        return
    if all(waits_for_exchange(node) for node in nodes):
        names = {type(node.commands[0]).__name__ for node in nodes}
        if len(names) == 1:
            yield Exchange(names.pop())
    if world.coupled:
        # Under DDP's `Join` a trainer that has left its loop is stood in for.
        shadowed = world.config.idle is Idle.STOP
        joined = [n for n in nodes if not (shadowed and n.trainer is Activity.DONE)]
        if joined and all(n.trainer is Activity.IN_GRADIENT for n in joined):
            yield Gradient(joined[0].steps - 1)


def waits_for_exchange(node: Node) -> bool:
    """Whether the batcher is in a collective that is not complete."""
    return bool(node.commands) and node.inbox is None and isinstance(node.commands[0], COLLECTIVES)
