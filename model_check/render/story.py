"""A trace told: its actions in sentences with their effects, who waits for whom, what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from model_check.end_promises import explain_deadlock
from model_check.render import words
from model_check.render.effects import Effect, at_hand, effects, lost, places_of
from model_check.render.sentences import Change, Sentence, sentence
from model_check.render.trace import Trace
from spec.config import CostRule
from spec.exchange import Steps
from spec.grouping import batch_cost, load_of_group, within
from spec.messages import Emit, PostCounts, PostReport, ShareReason, ShareSpare, Step, Tallied
from spec.rank import Phase
from spec.world import Action, Activity, Node, Outbox, Receive, State, World, decided


@dataclass(frozen=True)
class Told:
    """One action. number: from 1. error: what it raised, or None. last: whether the promise breaks
    here."""

    number: int
    action: Action
    sentence: Sentence
    effects: tuple[Effect, ...]
    error: str | None
    last: bool


def told(trace: Trace) -> tuple[Told, ...]:
    """All actions of a trace."""
    steps = []
    afters: tuple[State | None, ...] = trace.states[1:]
    if trace.raised:
        afters = (*afters, None)
    for i, (before, action, after) in enumerate(
        zip(trace.states, trace.actions, afters, strict=False)
    ):
        found: list[Effect] = []
        if after is not None:
            for rank, (old, new) in enumerate(zip(before.nodes, after.nodes, strict=True)):
                found.extend(effects(trace.world, rank, old, new))
        steps.append(
            Told(
                number=i + 1,
                action=action,
                sentence=sentence(trace.world, Change(before, action, after)),
                effects=tuple(found),
                error=words.plain(trace.text) if after is None else None,
                last=bool(trace.promise) and i + 1 == len(trace.actions),
            )
        )
    return tuple(steps)


def waits(world: World, state: State) -> tuple[str, ...]:
    """Who waits for whom in a state, where it is not just its turn to go on."""
    sentences = explain_deadlock(world, state).split("; ")
    busy = {
        f"rank {rank} batcher waits for rank {rank} trainer to make room"
        for rank, node in enumerate(state.nodes)
        if isinstance(at_hand(node), Emit)
        if node.outbox is Outbox.CLOSED or world.habits.has_room(node, world.queue)
    }
    return tuple(s for s in sentences if s and not any(s.startswith(start) for start in busy))


def waits_of(world: World, state: State, rank: int) -> tuple[str, ...]:
    """What one rank waits for."""
    mine = f"rank {rank} "
    found = (s.removeprefix(mine) for s in waits(world, state) if s.startswith(mine))
    return tuple(s.replace(f"for {mine}", "for its ") for s in found)


# ---------------------------------------------------------------- what is wrong


def what_is_wrong(trace: Trace) -> tuple[str, ...]:
    """The end of the story, in a few sentences, each a line of its own."""
    says = words.PROMISES.get(trace.promise)
    lines = [f"The promise {trace.promise} says that {says}." if says else trace.promise]
    if trace.raised:
        lines.append(f"The last action cannot be performed: it raises {words.plain(trace.text)}.")
        lines.extend(_why_it_raised(trace))
    elif trace.promise == "deadlock-freedom" and " waits for " in trace.text:
        lines.append("In the last state nothing more can happen, and somebody still waits:")
        lines.extend(f"- {wait}" for wait in trace.text.split("; "))
    else:
        lines.append(f"{_capital(words.plain(trace.text))}.")
        lines.extend(_where_lost(trace))
        lines.extend(_too_large(trace))
        lines.extend(_too_late(trace))
        lines.extend(_round_and_round(trace))
    consequence = words.CONSEQUENCES.get(trace.promise)
    if trace.raised:
        consequence = "In a real job one process would end here with this error, and the others"
        consequence += " would wait for it."
    return (*lines, consequence) if consequence else tuple(lines)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _where_lost(trace: Trace) -> Iterator[str]:
    """Where each lost sample was last seen."""
    for rank, node in enumerate(trace.states[-1].nodes):
        if trace.promise != "identity-coverage" or not node.alive:
            continue
        for seq in sorted(lost(node)):
            for number in range(len(trace.states) - 1, -1, -1):
                places = places_of(trace.states[number].nodes[rank])
                place = next((name for name, seqs in places.items() if seq in seqs), None)
                if place is not None:
                    when = f"after action {number}" if number else "at the start"
                    yield f"Sample {seq} of rank {rank} was last seen in {place}, {when}."
                    break


def _due(trace: Trace) -> Iterator[tuple[int, Step]]:
    """The steps of each rank that are decided on and have not reached its trainer."""
    for rank, node in enumerate(trace.states[-1].nodes):
        for step in decided(node):
            yield rank, step


def _too_large(trace: Trace) -> Iterator[str]:
    """What the batches above the budget come to."""
    budget = trace.world.config.budget
    for rank, step in _due(trace) if trace.promise == "budget" else ():
        if step.group and not within(budget, load_of_group(step.group)):
            cost = words.many(batch_cost(budget, load_of_group(step.group)), "token")
            padded = ", padded," if budget.rule is CostRule.PADDED else ""
            batch = f"Rank {rank}'s batch of step {step.number}{padded}"
            yield f"{batch} comes to {cost}; the budget is {budget.tokens}."


def _too_late(trace: Trace) -> Iterator[str]:
    """Which samples wait for longer than the window allows."""
    window = trace.world.config.window
    for rank, step in _due(trace) if trace.promise == "bounded-delay" else ():
        for one in step.group:
            entered = trace.states[-1].nodes[rank].entered[one.seq]
            if step.round - entered + 1 > window:
                since = f"arrived in round {entered} and leaves in round {step.round} only"
                yield f"Sample {one.seq} of rank {rank} {since}; the window allows {window} rounds."


def _round_and_round(trace: Trace) -> Iterator[str]:
    """Which actions can be repeated for ever, if any."""
    if trace.repeats is not None:
        last, first = len(trace.actions), trace.repeats + 1
        same = trace.states[-1] == trace.states[trace.repeats]
        names = "" if same else ", but for the names of ranks,"
        then = f"after action {trace.repeats}" if trace.repeats else "at the start"
        which = f"action {last}" if first == last else f"actions {first} to {last}"
        yield f"After action {last} everything{names} is as it was {then}."
        yield f"So {which} can be repeated for ever, and the epoch never ends."


def _why_it_raised(trace: Trace) -> Iterator[str]:
    """What the rules of the world say where a rank cannot follow a decision."""
    action, world = trace.actions[-1], trace.world
    if not isinstance(action, Receive):
        return
    node = trace.states[-1].nodes[action.rank]
    if not isinstance(node.inbox, Tallied) or not node.machine.groups:
        return
    target = world.rules.target(node.inbox.tally)
    decision = world.rules.decide(world.config, world.world_size, node.inbox.tally, target)
    if not isinstance(decision, Steps):
        return
    groups = node.machine.groups
    held = sum(map(len, groups))
    holds = f"holds {words.many(held, 'sample')} in {words.many(len(groups), 'group')}"
    asked = f"By this protocol's rules the round is to have {words.many(decision.target, 'step')};"
    yield f"{asked} rank {action.rank} {holds}."
    if not 1 <= decision.target <= held:
        few = decision.target > held
        yield "Each step needs a sample." if few else "Samples need a step to leave in."
        return
    try:
        made = len(world.rules.align(groups, decision.target).groups)
    except Exception:
        return
    if made != decision.target:
        yield f"Its alignment makes {words.many(made, 'group')} of them, not {decision.target}."


def in_short(trace: Trace) -> str:
    """What broke, in one line."""
    if trace.promise == "deadlock-freedom" and " waits for " in trace.text:
        return "nothing more can happen, and somebody still waits"
    return words.plain(trace.text)


def standing(trace: Trace) -> tuple[tuple[str, ...], ...]:
    """How each rank stands at the end: what it is doing, and where its samples are."""
    ranks = []
    for rank, node in enumerate(trace.states[-1].nodes):
        lines = [f"rank {rank}: {doing(trace.world, node)}"]
        if node.alive:
            taken = words.many(node.steps, "step")
            lines.append(f"its trainer, after {taken}, is {trainer_is(node)}")
            lines += [f"in {place}: {words.names(s)}" for place, s in places_of(node).items() if s]
        ranks.append(tuple(lines))
    return tuple(ranks)


def doing(world: World, node: Node) -> str:
    """What the batcher of a rank is doing, in words."""
    if not node.alive:
        return "its process is gone"
    command, phase = at_hand(node), node.machine.phase
    if node.inbox is not None:
        return "the result of the exchange is there, it has not looked yet"
    match command:
        case PostReport():
            return "in the exchange of reports, until every rank has posted"
        case PostCounts():
            return "in the exchange of counts, until every rank has posted"
        case ShareSpare():
            return "in the exchange of a spare sample, until every rank is"
        case ShareReason():
            return "in the exchange of the reason of the failure, until every rank is"
        case Emit(step) if world.habits.has_room(node, world.queue):
            return f"making the batch of step {step.number}"
        case Emit(step):
            return f"waiting for room in its queue for step {step.number}"
        case _:
            pass
    if phase is Phase.ENDED and node.outcome is not None:
        return f"done with epoch {node.machine.place.epoch} ({words.outcome(node.outcome)})"
    return str(phase.value)


def trainer_is(node: Node) -> str:
    """What the trainer of a rank is, in words."""
    match node.trainer:
        case Activity.STOPPED:
            return "gone, as it stopped early"
        case Activity.IN_GRADIENT:
            return f"in the gradient of step {node.steps - 1}"
        case _:
            return str(node.trainer.value)
