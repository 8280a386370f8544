"""What each action is, in a sentence: derived from the states before and after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from model_check.render import words
from model_check.render.effects import at_hand
from spec.exchange import Tally
from spec.messages import Emit, Event, PostCounts, PostReport, Tallied, Totalled
from spec.rank import Phase, RankState
from spec.samples import Counts, Sample
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
    PutStep,
    Receive,
    SeeEnd,
    State,
    StopEarly,
    TakeStep,
    World,
)


class Sentence(NamedTuple):
    """Who or what, and what it does or what becomes of it."""

    subject: str
    predicate: str

    def __str__(self) -> str:
        return f"{self.subject} {self.predicate}"


class Change(NamedTuple):
    """An action between two states; after is None where it raised."""

    before: State
    action: Action
    after: State | None


def sentence(world: World, change: Change) -> Sentence:
    """Say what happens in one action."""
    match change.action:
        case Exchange(what):
            return _exchange(what, change)
        case Gradient():
            return _gradient(change.before)
        case _:
            return _of_rank(world, change, change.action.rank)


def _of_rank(world: World, change: Change, rank: int) -> Sentence:
    node = change.before.nodes[rank]
    after = change.after.nodes[rank] if change.after else None
    batcher, trainer = f"Rank {rank}", f"Rank {rank}'s trainer"
    match change.action:
        case Deliver(_, cost, weight):
            arriving = Sample(node.machine.arrived, cost, weight)
            return Sentence(batcher, f"reads {words.sample(world, arriving)}")
        case EndInput():
            empty = "" if node.machine.arrived else ", without a single sample"
            return Sentence(batcher, f"reaches the end of its input{empty}")
        case FailInput():
            return Sentence(batcher, "fails to read a sample")
        case Receive():
            return Sentence(batcher, _result(node.inbox, after))
        case LosePeer():
            return Sentence(batcher, "notices, in the exchange, that another rank is gone")
        case PutStep():
            return Sentence(batcher, f"puts {_due(node)} into its queue")
        case FailBatch():
            return Sentence(batcher, f"fails to make the batch of {_due(node)}")
        case NoticeStop():
            return Sentence(batcher, "notices that its trainer has stopped")
        case TakeStep():
            entered = after is not None and after.trainer is Activity.IN_GRADIENT
            then = " and enters the gradient" if entered else ""
            return Sentence(trainer, f"takes {words.step(node.queue[0])}{then}")
        case BreakGradient():
            return Sentence(trainer, "gets an error from the gradient, as another rank is gone")
        case SeeEnd():
            return Sentence(trainer, f"finds the end of the epoch{_left(after)}")
        case StopEarly():
            return Sentence(trainer, f"stops early{_when(node)}")
        case NextEpoch():
            return Sentence(batcher, f"begins epoch {node.machine.place.epoch + 1}")
        case HearOfFailure():
            return Sentence(trainer, "asks for the next epoch, and learns that the last one failed")
        case Crash():
            return Sentence(batcher, "dies: its process is gone")
    raise AssertionError(f"no sentence for {change.action}")


def _when(node: Node) -> str:
    return f", after {words.many(node.steps, 'step')}" if node.steps else ", before its first step"


def _due(node: Node) -> str:
    command = at_hand(node)
    return words.step(command.step) if isinstance(command, Emit) else "a step"


def _left(after: Node | None) -> str:
    if after is None:
        return ""
    if after.trainer is Activity.DONE:
        return " and is done"
    how = "" if after.outcome is None else f" ({words.outcome(after.outcome)})"
    return f" and raises an error{how}"


# ---------------------------------------------------------------- collectives


def _exchange(what: str, change: Change) -> Sentence:
    subject = f"The exchange of {EXCHANGES.get(what, what)}"
    if change.after is None:
        return Sentence(subject, f"cannot complete: {_posted(change.before.nodes)}")
    result = _found(len(change.after.nodes), change.after.nodes[0].inbox)
    return Sentence(subject, f"completes: {result}" if result else "completes")


EXCHANGES = {
    "PostReport": "reports",
    "PostCounts": "counts",
    "ShareSpare": "a spare sample",
    "ShareReason": "the reason of the failure",
}
"""What is exchanged, by the name of the command."""


def _posted(nodes: Sequence[Node]) -> str:
    posts = []
    for rank, node in enumerate(nodes):
        command = at_hand(node)
        if isinstance(command, PostCounts):
            steps = words.many(len(command.counts), "step")
            posts.append(f"rank {rank} posts counts for {steps}")
        elif isinstance(command, PostReport):
            posts.append(f"rank {rank} posts a report")
    return words.listed(posts)


def _result(inbox: Event | None, after: Node | None) -> str:
    match inbox:
        case Tallied():
            return (
                f"takes the decision: {_decided(after.machine)}" if after else "takes the decision"
            )
        case Totalled():
            return "learns what the steps of the round add up to on all ranks"
        case _:
            return "looks at the result of the exchange"


def _decided(machine: RankState) -> str:
    if machine.phase is Phase.ENDED:
        return "the epoch ends"
    if machine.phase is Phase.EMITTING:
        return "no more steps; those that wait are the last block"
    if machine.phase is not Phase.TOTALLING:
        return f"{words.many(len(machine.pending), 'step')} in this round"
    steps = f"{words.many(len(machine.groups), 'step')} in this round"
    return (
        f"{steps}, carries {words.names(s.seq for s in machine.window)}"
        if machine.window
        else steps
    )


def _found(ranks: int, inbox: Event | None) -> str:
    match inbox:
        case Tallied(tally):
            return tally_words(ranks, tally)
        case Totalled(totals):
            return totals_words(totals)
        case _:
            return ""


def tally_words(ranks: int, tally: Tally) -> str:
    """What the reports of this many ranks say together."""
    for term, low, high in zip(tally.low._fields, tally.low, tally.high, strict=True):
        if low != high:
            return f"ranks differ in their {term}: {low} and {high}"
    if tally.failed_rank < ranks:
        return f"rank {tally.failed_rank} has failed"
    if tally.closed_rank < ranks:
        return f"the trainer of rank {tally.closed_rank} has stopped"
    if tally.want == 0:
        return "no rank wants a step"
    drained = "; a rank is drained" if tally.any_drained else ""
    return f"most groups wanted {tally.want}, fewest samples held {tally.limit}{drained}"


def totals_words(totals: Sequence[Counts]) -> str:
    """What the steps of a round add up to on all ranks."""
    steps = (words.many(total.samples, "sample") for total in totals)
    return ", ".join(f"step {i} of the round: {count}" for i, count in enumerate(steps, start=1))


def _gradient(before: State) -> Sentence:
    inside = {r: n.steps - 1 for r, n in enumerate(before.nodes) if _in_gradient(n)}
    steps = set(inside.values())
    if len(steps) == 1:
        return Sentence(f"The gradient of step {steps.pop()}", "completes: every trainer is in it")
    where = (f"rank {rank} is in step {number}" for rank, number in inside.items())
    return Sentence("A gradient", f"completes across different steps: {words.listed(where)}")


def _in_gradient(node: Node) -> bool:
    return node.trainer is Activity.IN_GRADIENT
