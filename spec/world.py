"""What the closed system is made of: its bounds, the state of a rank with its environment, and the
actions by which that state changes. How it changes is in `spec.system`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from spec.config import Config
from spec.errors import ConfigError
from spec.messages import Command, Event, Outcome, Step
from spec.rank import Phase, RankState, Rules, Setup, Transition, transition


class Stop(Enum):
    """How trainers may stop before the end of an epoch."""

    NEVER = "never"
    TOGETHER = "all after the same step"
    ALONE = "one of them, whenever it likes"


@dataclass(frozen=True)
class Faults:
    """What may go wrong, at most `most` times in a run. input: reading a sample fails. batch:
    making a batch fails. crash: a rank's process dies."""

    most: int = 0
    input: bool = True
    batch: bool = True
    crash: bool = True


class Outbox(Enum):
    """The state of an output queue beside its content."""

    OPEN = "open"
    FINISHED = "finished by the batcher"
    CUT = "cut short, as a peer is lost"
    CLOSED = "closed by the trainer"


class Activity(Enum):
    """What a trainer is doing."""

    READY = "ready for its next step"
    IN_GRADIENT = "in the gradient collective"
    DONE = "done with the epoch"
    FAILED = "ended by an error"
    STOPPED = "stopped early"


class Node(NamedTuple):
    """One rank and its environment.

    machine: the batcher's state. commands: those it still has to perform, the first one now.
    inbox: the result of a complete exchange that it has not looked at yet.
    queue, outbox: the output queue. outcome: how the batcher ended the epoch.
    trainer: what the trainer does; steps: how many steps it has taken this epoch.
    left: how many samples the input may still deliver.
    surrendered: it could make not even an idle step.

    The rest is a log, for the promises to look at; nothing depends on it. taken, filtered,
    dropped: the samples that reached the trainer, were filtered, and were in the queue when the
    trainer left it or a peer was lost, each a bit for each `seq`. entered: the round in which each
    sample arrived. got: how many samples the steps that the trainer has taken held, on all ranks
    together.
    """

    machine: RankState
    commands: tuple[Command, ...]
    left: int
    inbox: Event | None = None
    queue: tuple[Step, ...] = ()
    outbox: Outbox = Outbox.OPEN
    outcome: Outcome | None = None
    trainer: Activity = Activity.READY
    steps: int = 0
    alive: bool = True
    surrendered: bool = False
    taken: int = 0
    filtered: int = 0
    dropped: int = 0
    entered: tuple[int, ...] = ()
    got: int = 0


Machine = Callable[[Setup, RankState, Event], Transition]
"""The signature of `spec.rank.transition`."""


def finish_queue(node: Node) -> Node:
    """The batcher puts no more steps into its queue. Those in it stay for the trainer."""
    return node._replace(outbox=Outbox.FINISHED) if node.outbox is Outbox.OPEN else node


def cut_queue(node: Node) -> Node:
    """A peer is gone: the steps in the queue are dropped, and the trainer gets the error next. (One
    that has left, or was given all of them, does not.)"""
    if node.outbox is Outbox.OPEN or (node.outbox is Outbox.FINISHED and node.queue):
        node = node._replace(outbox=Outbox.CUT)
    return node._replace(queue=(), dropped=node.dropped | bits(node.queue))


def leave_queue(node: Node) -> Node:
    """The trainer takes no more steps from its queue: it is emptied, so that a batcher that waits
    for room goes on."""
    dropped = node.dropped | bits(node.queue)
    return node._replace(outbox=Outbox.CLOSED, queue=(), dropped=dropped)


def has_room(node: Node, capacity: int) -> bool:
    """Whether a batcher may put a step into its queue."""
    return len(node.queue) < capacity


def may_begin(node: Node) -> bool:
    """Whether a rank may begin its next epoch: its batcher has ended the one before, and has told
    or heard why, if it failed."""
    return node.machine.phase is Phase.ENDED and not node.commands


@dataclass(frozen=True)
class Habits:
    """What the loader does around the protocol, with its queue and between epochs."""

    finish_queue: Callable[[Node], Node] = finish_queue
    cut_queue: Callable[[Node], Node] = cut_queue
    leave_queue: Callable[[Node], Node] = leave_queue
    has_room: Callable[[Node, int], bool] = has_room
    may_begin: Callable[[Node], bool] = may_begin


FAITHFUL = Habits()
"""The loader as it is."""


def decided(node: Node) -> tuple[Step, ...]:
    """The steps that are decided on and have not reached the trainer."""
    return (*node.queue, *node.machine.pending, *node.machine.waiting)


def bits(steps: tuple[Step, ...]) -> int:
    """The samples of some steps, a bit for each `seq`."""
    return sum(1 << s.seq for step in steps for s in step.group)


SHIPPED = Rules()
"""The protocol as it is."""


@dataclass(frozen=True)
class World:
    """The bounds of a closed system.

    kinds: the (cost, weight) pairs that an input may deliver; at most `samples` on a rank in an
        epoch. queue: capacity of an output queue, in steps. epochs: how many in a row.
    coupled: trainers meet in a gradient collective in every step, as data-parallel training does.
    rules, machine, habits: the protocol, and what the loader does around it; to be replaced by
        variants that must not hold.
    """

    config: Config
    world_size: int
    kinds: tuple[tuple[int, int], ...]
    samples: int
    queue: int = 1
    epochs: int = 1
    coupled: bool = True
    stop: Stop = Stop.NEVER
    faults: Faults = Faults()
    rules: Rules = SHIPPED
    machine: Machine = transition
    habits: Habits = FAITHFUL

    def __post_init__(self) -> None:
        if self.stop is Stop.ALONE and self.coupled:
            raise ConfigError(
                "a trainer that stops alone leaves the others in their gradient collective for "
                "ever, whatever the loader does: use coupled=False"
            )

    def setup(self, rank: int) -> Setup:
        """The setup of a rank's state machine."""
        return Setup(self.config, rank, self.world_size, self.rules)


class State(NamedTuple):
    """The whole system. stop_after: the step after which all trainers stop, if they do. faults,
    stops: how many more there may be."""

    nodes: tuple[Node, ...]
    faults: int
    stops: int
    stop_after: int | None = None


# ---------------------------------------------------------------- actions


@dataclass(frozen=True)
class Deliver:
    """The input of a rank delivers a sample of some kind."""

    rank: int
    cost: int
    weight: int


@dataclass(frozen=True)
class EndInput:
    """The input of a rank has no more samples."""

    rank: int


@dataclass(frozen=True)
class FailInput:
    """Reading a sample fails on a rank."""

    rank: int


@dataclass(frozen=True)
class Exchange:
    """A collective of the batchers completes: all of them are in it."""

    what: str


@dataclass(frozen=True)
class Receive:
    """The batcher of a rank looks at the result of the exchange."""

    rank: int


@dataclass(frozen=True)
class LosePeer:
    """The batcher of a rank notices that a rank has died."""

    rank: int


@dataclass(frozen=True)
class PutStep:
    """The batcher of a rank puts a step into its queue, which has room."""

    rank: int


@dataclass(frozen=True)
class FailBatch:
    """The batcher of a rank fails to make the batch of a step."""

    rank: int


@dataclass(frozen=True)
class NoticeStop:
    """The batcher of a rank notices that its trainer has stopped."""

    rank: int


@dataclass(frozen=True)
class TakeStep:
    """The trainer of a rank takes a step from its queue (and enters the gradient collective)."""

    rank: int


@dataclass(frozen=True)
class Gradient:
    """The gradient collective of a step completes: all trainers are in it."""

    step: int


@dataclass(frozen=True)
class BreakGradient:
    """The gradient collective fails for a trainer, as a rank has died."""

    rank: int


@dataclass(frozen=True)
class SeeEnd:
    """The trainer of a rank finds its queue empty and finished."""

    rank: int


@dataclass(frozen=True)
class StopEarly:
    """The trainer of a rank stops early and closes its queue."""

    rank: int


@dataclass(frozen=True)
class NextEpoch:
    """A rank starts its next epoch."""

    rank: int


@dataclass(frozen=True)
class HearOfFailure:
    """The trainer of a rank, which had left an epoch before its end, asks for the next one and
    learns that the epoch failed."""

    rank: int


@dataclass(frozen=True)
class Crash:
    """The process of a rank dies."""

    rank: int


Action = (
    Deliver
    | EndInput
    | FailInput
    | Exchange
    | Receive
    | LosePeer
    | PutStep
    | FailBatch
    | NoticeStop
    | TakeStep
    | Gradient
    | BreakGradient
    | SeeEnd
    | StopEarly
    | NextEpoch
    | HearOfFailure
    | Crash
)
