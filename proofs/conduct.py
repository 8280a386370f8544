"""What a rank says and does after an event: every command's content, and every number it keeps."""

from __future__ import annotations

from typing import Any

from model_check.abstract import Row
from model_check.prover import both
from proofs.reports import equal, lifted
from spec.blocks import Gathered
from spec.config import Idle, terms_of
from spec.enabled import COLLECTIVES
from spec.exchange import Abort, Close, Decision, Finish, Flush, Mismatch, Report, Steps
from spec.messages import (
    AbortedBy,
    Arrived,
    ClosedBy,
    Command,
    Emit,
    Emitted,
    End,
    Event,
    Failed,
    Filter,
    Finished,
    GiveUp,
    KeepSpare,
    Lost,
    Mismatched,
    PeerLost,
    PostCounts,
    PostReport,
    Pull,
    Retire,
    ShareReason,
    ShareSpare,
    Step,
    Tallied,
    Totalled,
)
from spec.rank import Input, Phase, RankState, Setup, Trainer, has_spare, room_left
from spec.samples import NOTHING, counts_of

ASKS: dict[Phase, type[Command]] = {
    Phase.FILLING: Pull,
    Phase.REPORTING: PostReport,
    Phase.TOTALLING: PostCounts,
    Phase.EMITTING: Emit,
    Phase.ENDED: End,
}
"""The command that a rank in a phase has given last, and whose answer it waits for."""

SILENT = (Filter, KeepSpare, ShareSpare, Retire, GiveUp, ShareReason)
"""The commands that ask for no event."""


def held_samples(state: RankState) -> Any:
    """How many samples the rank holds."""
    steps = [step.group for step in (*state.waiting, *state.pending)]
    return len(state.window) + sum(len(group) for group in (*state.groups, *steps))


def grouped_samples(state: RankState) -> Any:
    """How many samples are in the groups of the round."""
    return sum(len(group) for group in state.groups)


def blocks_after(setup: Setup, before: RankState, event: Totalled) -> Gathered:
    """Which blocks are complete with the steps that are decided on by these totals."""
    taken = setup.rules.take_steps(setup.config, before.delivered, event.totals).steps
    decided = Row(Step(0, 0, group, NOTHING, NOTHING) for group in before.groups[:taken])
    return setup.rules.gather(setup.config, before.waiting, decided)


def asks(setup: Setup, before: RankState, after: RankState, commands: Any) -> Any:
    """The last command asks for the one thing that the phase waits for, and no other asks; and it
    says what the state says."""
    if not commands:
        return after.phase is before.phase  # the last question is still open
    *first, last = commands
    well_formed = isinstance(last, ASKS[after.phase]) and all(isinstance(c, SILENT) for c in first)
    if not well_formed:
        return False
    match last:
        case Pull(limit):
            return both(limit >= 1, limit == room_left(setup, after))
        case PostReport(tally):
            return equal(tally, lifted(_report(setup, after), setup.rank, setup.world_size))
        case PostCounts(counts):
            pairs = list(zip(counts, after.groups, strict=False))
            as_many = _elements(counts) == _elements(after.groups)
            return both(as_many, *(same(c, counts_of(group)) for c, group in pairs))
        case Emit(_) if not after.pending:
            return False
        case Emit(step):
            due = len(after.waiting) + len(after.pending)
            numbered = step.number == after.place.step - due
            return both(step is after.pending[0], numbered)
        case _:
            return True


def _report(setup: Setup, state: RankState) -> Report:
    """What a rank in this state has to report."""
    holding = bool(state.groups)
    return Report(
        terms=terms_of(setup.config, state.place),
        want=len(state.groups) if holding else 0,
        limit=grouped_samples(state) if holding else setup.config.window,
        has_spare=has_spare(state),
        waiting=bool(state.waiting),
        failed=state.input is Input.FAILED,
        closed=state.trainer is Trainer.STOPPED,
    )


def _elements(values: Any) -> int:
    """How many elements there are, whatever each of them stands for."""
    return sum(1 for _ in values)


def same(a: Any, b: Any) -> Any:
    """Whether two named tuples of numbers are equal, field by field."""
    return both(*(x == y for x, y in zip(a, b, strict=True)))


def follows(setup: Setup, before: RankState, event: Event, after: RankState, commands: Any) -> Any:
    """What a rank does upon a tally depends on the decision alone, so that all ranks do the same:
    it posts the same collectives, or ends as the decision says. It ends for no other reason."""
    ends: list[Any] = [c.outcome for c in commands if isinstance(c, End)]
    if isinstance(event, PeerLost):
        return ends == [Lost(event.rank)]
    if not isinstance(event, Tallied):
        return not ends
    decision = _decision(setup, event)
    collectives: list[Any] = [c for c in commands if isinstance(c, COLLECTIVES)]
    kinds = [type(c) for c in collectives]
    match decision:
        case Steps(target, donor):
            lent = kinds == [ShareSpare, PostCounts] if donor is not None else kinds == [PostCounts]
            if not lent or ends:
                return False
            agreed = True if donor is None else collectives[0].donor == donor
            return both(agreed, len(after.groups) == target, _can_idle(setup, before, after))
        case Flush():  # (a rank whose trainer has stopped emits nothing, and reports at once)
            return not ends and all(kind is PostReport for kind in kinds)
        case Finish():
            return not kinds and ends == [Finished()]
        case Close(rank) if not kinds and _ended(ends, ClosedBy):
            return ends[0].rank == rank
        case Abort(rank) if kinds == [ShareReason] and _ended(ends, AbortedBy):
            return both(collectives[0].rank == rank, ends[0].rank == rank)
        case Mismatch(term, low, high) if not kinds and _ended(ends, Mismatched):
            return both(ends[0].term == term, ends[0].low == low, ends[0].high == high)
        case _:
            return False


def _ended(ends: list[Any], kind: type[Any]) -> bool:
    return [type(outcome) for outcome in ends] == [kind]


def _can_idle(setup: Setup, before: RankState, after: RankState) -> bool:
    """A rank that has to idle has something to do it with. (With idle stop it does not.)"""
    return bool(before.groups) or setup.config.idle is Idle.STOP or has_spare(after)


def counts_on(setup: Setup, before: RankState, event: Event, after: RankState) -> Any:
    """The numbers that a rank keeps: where it is, how many samples have arrived and, of all ranks,
    were delivered."""
    place, arrived, delivered = before.place, before.arrived, before.delivered
    if isinstance(event, Totalled):
        progress = setup.rules.take_steps(setup.config, before.delivered, event.totals)
        place = place._replace(round=place.round + 1, step=place.step + progress.steps)
        delivered = progress.delivered
    if _flushes(setup, event):
        place = place._replace(round=place.round + 1)
    if after.phase is Phase.ENDED:
        place = place._replace(step=place.step - len(before.waiting))
    if isinstance(event, Arrived):
        arrived = arrived + len(event.samples)
    return both(same(after.place, place), after.arrived == arrived, after.delivered == delivered)


def _decision(setup: Setup, event: Tallied) -> Decision:
    """What all ranks do upon this tally."""
    rules, tally = setup.rules, event.tally
    return rules.decide(setup.config, setup.world_size, tally, rules.target(tally))


def _flushes(setup: Setup, event: Event) -> bool:
    return isinstance(event, Tallied) and isinstance(_decision(setup, event), Flush)


def filters(setup: Setup, event: Event, after: RankState, commands: Any) -> Any:
    """Exactly what is not to be trained on is filtered; of the rest one sample at least is kept for
    idle steps."""
    filtered = [c.sample for c in commands if isinstance(c, Filter)]
    if not isinstance(event, Arrived):
        return not filtered
    due = [s for s in event.samples if not setup.rules.trainable(s)]
    exactly = [id(s) for s in filtered] == [id(s) for s in due]
    return exactly and (len(due) == len(event.samples) or has_spare(after))


def steps_first(
    setup: Setup, before: RankState, event: Event, after: RankState, commands: Any
) -> Any:
    """Every step that was decided on is emitted or still to be emitted, or waits for its block, so
    that an epoch can end behind the last complete block only, and they stay in their order. (A rank
    that has lost a peer emits no more; nor does one that gives up, which it does only if it cannot
    make even an idle step, or is alone.)"""
    if any(isinstance(c, GiveUp) for c in commands):
        if not isinstance(event, Failed) or not before.pending:
            return False
        return before.pending[0].idle or setup.world_size == 1
    if isinstance(event, PeerLost) or after.trainer is not Trainer.SERVED:
        return True
    emitted = before.place.step - len(before.waiting) - len(before.pending)
    left = after.place.step - len(after.waiting) - len(after.pending)
    complete = left == emitted + isinstance(event, Emitted)
    return both(complete, _in_order(setup, before, event, after))


def _in_order(setup: Setup, before: RankState, event: Event, after: RankState) -> bool:
    due: tuple[Any, ...] = before.pending
    waiting: tuple[Any, ...] = () if after.phase is Phase.ENDED else before.waiting
    if isinstance(event, Emitted):
        due = due[1:]
    if isinstance(event, Totalled):
        due, waiting = blocks_after(setup, before, event)
    if _flushes(setup, event):
        due, waiting = before.waiting, ()
    if not _same_groups(after.waiting, waiting):
        return False
    if isinstance(event, Failed):
        return _elements(after.pending) == _elements(due)
    return _same_groups(after.pending, due)


def _same_groups(a: Any, b: Any) -> bool:
    """Whether steps hold the very same groups, in the same order."""
    return _identical([step.group for step in a], [step.group for step in b])


def _identical(a: Any, b: Any) -> bool:
    return [id(x) for x in a] == [id(y) for y in b]
