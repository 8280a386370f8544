"""Changed machines: what a rank does with an event."""

from __future__ import annotations

from spec.exchange import Finish, decide
from spec.messages import (
    AbortedBy,
    ClosedBy,
    Emit,
    End,
    Event,
    Failed,
    Finished,
    InputEnded,
    PostCounts,
    PostReport,
    Retire,
    Tallied,
    Totalled,
)
from spec.rank import Input, Phase, RankState, Setup, Transition, transition
from spec.samples import NOTHING, add_counts, counts_of


def _ended(state: RankState, outcome: Finished | AbortedBy | ClosedBy) -> Transition:
    state = state._replace(phase=Phase.ENDED, groups=(), pending=())
    return Transition(state, (End(outcome),))


def drained_ranks_leave(setup: Setup, state: RankState, event: Event) -> Transition:
    after = transition(setup, state, event)
    posts = any(isinstance(command, PostReport) for command in after.commands)
    if posts and after.state.input is Input.ENDED and not after.state.groups:
        return _ended(after.state, Finished())
    return after


def target_from_own_report(setup: Setup, state: RankState, event: Event) -> Transition:
    if isinstance(event, Tallied) and state.groups:
        event = Tallied(event.tally._replace(want=len(state.groups)))
    return transition(setup, state, event)


def carry_dropped_at_the_end_of_input(setup: Setup, state: RankState, event: Event) -> Transition:
    after = transition(setup, state, event)
    if after.state.phase is Phase.TOTALLING and after.state.input is Input.ENDED:
        return after._replace(state=after.state._replace(window=()))
    return after


def finish_is_asked_again(setup: Setup, state: RankState, event: Event) -> Transition:
    """When all is done, a rank posts the same report once more, to be sure."""
    after = transition(setup, state, event)
    if any(isinstance(c, End) and isinstance(c.outcome, Finished) for c in after.commands):
        filling = state._replace(phase=Phase.FILLING, input=Input.OPEN)
        return transition(setup, filling, InputEnded())
    return after


def failed_ranks_leave(setup: Setup, state: RankState, event: Event) -> Transition:
    if isinstance(event, Failed):
        return _ended(state, AbortedBy(setup.rank))
    return transition(setup, state, event)


def failed_batches_leave_a_gap(setup: Setup, state: RankState, event: Event) -> Transition:
    after = transition(setup, state, event)
    if isinstance(event, Failed) and after.state.pending:
        # As if even an idle step could not be made, but without telling the trainer.
        after = transition(setup, after.state, event)
        return after._replace(commands=after.commands[1:])
    return after


def quota_by_own_count(setup: Setup, state: RankState, event: Event) -> Transition:
    if isinstance(event, Totalled):
        event = Totalled(tuple(map(counts_of, state.groups)))
    return transition(setup, state, event)


def quota_counts_double(setup: Setup, state: RankState, event: Event) -> Transition:
    if isinstance(event, Totalled):
        event = Totalled(tuple(add_counts(total, total) for total in event.totals))
    return transition(setup, state, event)


def quota_ignored(setup: Setup, state: RankState, event: Event) -> Transition:
    after = transition(setup, state._replace(delivered=0), event)
    return after._replace(state=after.state._replace(delivered=0))


def steps_behind_the_quota_lost(setup: Setup, state: RankState, event: Event) -> Transition:
    after = transition(setup, state, event)
    if isinstance(event, Totalled):
        return after._replace(state=after.state._replace(window=state.window))
    return after


def retired_ranks_leave(setup: Setup, state: RankState, event: Event) -> Transition:
    after = transition(setup, state, event)
    if any(isinstance(command, Retire) for command in after.commands):
        return _ended(after.state, Finished())
    return after


def idle_ranks_skip_the_counts(setup: Setup, state: RankState, event: Event) -> Transition:
    """A rank without samples takes no part in the second exchange: it makes up the totals."""
    after = transition(setup, state, event)
    if after.commands and isinstance(after.commands[-1], PostCounts):
        counts = after.commands[-1].counts
        if all(count == NOTHING for count in counts):
            return transition(setup, after.state, Totalled(counts))
    return after


def emit_in_reverse(setup: Setup, state: RankState, event: Event) -> Transition:
    after = transition(setup, state, event)
    if isinstance(event, Totalled) and len(after.state.pending) > 1:
        pending = after.state.pending[::-1]
        return Transition(after.state._replace(pending=pending), (Emit(pending[0]),))
    return after


def forget_the_group_of_a_failed_batch(setup: Setup, state: RankState, event: Event) -> Transition:
    after = transition(setup, state, event)
    if isinstance(event, Failed) and state.pending:
        group = state.pending[0].group
        window = tuple(s for s in after.state.window if s not in group)
        return after._replace(state=after.state._replace(window=window))
    return after


def no_exchange(setup: Setup, state: RankState, event: Event) -> Transition:
    """Without a process group each rank decides by itself, as the published package does where its
    side process has none."""
    after = transition(setup, state, event)
    while after.commands and isinstance(after.commands[-1], PostReport | PostCounts):
        last = after.commands[-1]
        before, answer = after.commands[:-1], _alone(last)
        following = transition(setup, after.state, answer)
        after = Transition(following.state, (*before, *following.commands))
    return after


def _alone(command: PostReport | PostCounts) -> Event:
    return Tallied(command.tally) if isinstance(command, PostReport) else Totalled(command.counts)


def finished_ranks_post_no_counts(setup: Setup, state: RankState, event: Event) -> Transition:
    """A finished rank advertises that it wants nothing and leaves, while others go on."""
    if isinstance(event, Tallied) and not state.groups and state.input is Input.ENDED:
        decision = decide(setup.config, setup.world_size, event.tally, 1)
        if not isinstance(decision, Finish):
            return _ended(state, Finished())
    return transition(setup, state, event)


def end_of_input_discards_the_window(setup: Setup, state: RankState, event: Event) -> Transition:
    if isinstance(event, InputEnded) and state.window:
        state = state._replace(window=state.window[1:])
    return transition(setup, state, event)
