"""The closed system: all ranks with their environment, as one immutable state and its actions.

A rank here is what it is in a training job: an input, the batcher (the state machine of
`spec.rank`, the very functions that the loader runs), a bounded output queue, and a trainer that
takes steps from it and meets the other trainers in a gradient collective. Everything that can
happen next, anywhere, is an action; `actions` lists them in a fixed order and `act` performs one.
Whoever explores the system chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

from spec.errors import EnvelopeError
from spec.exchange import decode, encode, merge
from spec.messages import (
    Arrived,
    Closed,
    ClosedBy,
    Emit,
    Emitted,
    End,
    Event,
    Failed,
    Filter,
    Finished,
    GiveUp,
    InputEnded,
    KeepSpare,
    Lost,
    PeerLost,
    PostCounts,
    PostReport,
    Retire,
    Tallied,
    Totalled,
)
from spec.rank import Phase, Trainer, start
from spec.samples import Sample, add_counts
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
    Stop,
    StopEarly,
    TakeStep,
    World,
    bits,
)


def initial_states(world: World) -> Iterator[State]:
    """The states in which a run may begin: one, or one for each step after which all stop."""
    nodes = tuple(fresh(world, rank, epoch=0) for rank in range(world.world_size))
    faults, stops = world.faults.most, int(world.stop is Stop.ALONE)
    if world.stop is Stop.TOGETHER:
        for step in range(world.world_size * world.samples + 1):
            yield State(nodes, faults, stops, stop_after=step)
    else:
        yield State(nodes, faults, stops)


def act(world: World, state: State, action: Action) -> State:
    """The state after an enabled action. Raises what the protocol's functions raise: the shipped
    ones never do."""
    if isinstance(action, Exchange):
        return state._replace(nodes=exchange(world, state.nodes))
    if isinstance(action, Gradient):
        return state._replace(nodes=gradient(state.nodes))
    rank = action.rank
    node = act_locally(world, rank, state.nodes[rank], action)
    return state._replace(
        nodes=(*state.nodes[:rank], node, *state.nodes[rank + 1 :]),
        faults=state.faults - isinstance(action, FAULTS),
        stops=max(0, state.stops - isinstance(action, StopEarly)),
    )


FAULTS = (FailInput, FailBatch, Crash)
"""The actions that use up a fault."""


def act_locally(world: World, rank: int, node: Node, action: Action) -> Node:
    """A rank after one of its own actions."""
    match action:
        case Deliver(_, cost, weight):
            arrived = Arrived((Sample(node.machine.arrived, cost, weight),))
            entered = (*node.entered, node.machine.place.round)
            node = node._replace(left=node.left - 1, entered=entered)
            return _feed(world, rank, node, arrived)
        case EndInput():
            return _feed(world, rank, node, InputEnded())
        case FailInput() | FailBatch():
            return _feed(world, rank, node, Failed())
        case Receive() if node.inbox is not None:
            return _feed(world, rank, node._replace(inbox=None), node.inbox)
        case LosePeer() if node.machine.phase is Phase.ENDED:
            # While ranks tell each other why one of them failed.
            return _settle(world, world.habits.cut_queue(node)._replace(commands=node.commands[1:]))
        case LosePeer():
            return _feed(world, rank, node._replace(inbox=None), PeerLost(None))
        case NoticeStop():
            return _feed(world, rank, node, Closed())
        case PutStep():
            command = node.commands[0]
            assert isinstance(command, Emit)
            return _feed(world, rank, node._replace(queue=(*node.queue, command.step)), Emitted())
        case TakeStep():
            step = node.queue[0]
            return node._replace(
                queue=node.queue[1:],
                trainer=Activity.IN_GRADIENT if world.coupled else Activity.READY,
                steps=step.number + 1,
                taken=node.taken | bits((step,)),
                got=node.got + step.total.samples,
            )
        case BreakGradient():
            return world.habits.leave_queue(node._replace(trainer=Activity.FAILED))
        case SeeEnd():
            # A retired trainer leaves in peace, whatever becomes of the epoch, unless steps that it
            # had still to take were dropped.
            retired = node.machine.trainer is Trainer.RETIRED
            good = not node.surrendered and isinstance(node.outcome, Finished | ClosedBy)
            good = (good or retired) and node.outbox is not Outbox.CUT
            return node._replace(trainer=Activity.DONE if good else Activity.FAILED)
        case StopEarly():
            return world.habits.leave_queue(node._replace(trainer=Activity.STOPPED))
        case HearOfFailure():
            return node._replace(trainer=Activity.FAILED)
        case NextEpoch():
            return fresh(world, rank, node.machine.place.epoch + 1)
        case Crash():
            return world.habits.leave_queue(node._replace(alive=False, commands=(), inbox=None))
        case _:
            raise AssertionError(f"{action} is not an action of one rank")


def _feed(world: World, rank: int, node: Node, event: Event) -> Node:
    """Give the batcher an event; its next commands replace the one that asked for it."""
    machine, commands = world.machine(world.setup(rank), node.machine, event)
    return _settle(world, node._replace(machine=machine, commands=commands))


def _settle(world: World, node: Node) -> Node:
    """Perform the commands that need nobody else, up to the first that does."""
    while node.commands:
        match node.commands[0]:
            case Filter(sample):
                node = node._replace(filtered=node.filtered | 1 << sample.seq)
            case KeepSpare():
                pass
            case Retire():
                node = world.habits.finish_queue(node)
            case GiveUp():
                node = world.habits.finish_queue(node)._replace(surrendered=True)
            case End(outcome):
                if isinstance(outcome, Lost):
                    node = world.habits.cut_queue(node)
                node = world.habits.finish_queue(node)._replace(outcome=outcome)
            case _:
                return node
        node = node._replace(commands=node.commands[1:])
    return node


def exchange(world: World, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Complete the collective that all batchers are in: each finds the result in its inbox."""
    fronts = [node.commands[0] for node in nodes]
    event: Event | None = None
    if isinstance(fronts[0], PostReport):
        tallies = [front.tally for front in fronts if isinstance(front, PostReport)]
        event = Tallied(decode(encode(reduce(merge, tallies))))
    elif isinstance(fronts[0], PostCounts):
        counts = [front.counts for front in fronts if isinstance(front, PostCounts)]
        steps = {len(of_rank) for of_rank in counts}
        if len(steps) > 1:
            raise EnvelopeError(f"ranks post counts for different numbers of steps: {steps}")
        totals = (reduce(add_counts, of_step) for of_step in zip(*counts, strict=True))
        event = Totalled(tuple(totals))
    if event is None:
        return tuple(_settle(world, node._replace(commands=node.commands[1:])) for node in nodes)
    return tuple(node._replace(inbox=event) for node in nodes)


def gradient(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Complete the gradient collective: its trainers go on to their next step."""
    return tuple(
        node._replace(trainer=Activity.READY) if node.trainer is Activity.IN_GRADIENT else node
        for node in nodes
    )


def fresh(world: World, rank: int, epoch: int) -> Node:
    """A rank at the start of an epoch."""
    machine, commands = start(world.setup(rank), epoch)
    return Node(machine, commands, left=world.samples)
