"""A sample that has arrived is in exactly one place, and a rank never waits for what cannot come:
by induction over the events of one rank's state machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from model_check.abstract import some_samples
from model_check.prover import OUTSIDE, Obligation, Parts, Source, both, implies, negation
from proofs.conduct import (
    asks,
    blocks_after,
    counts_on,
    filters,
    follows,
    grouped_samples,
    held_samples,
    steps_first,
)
from proofs.invariant import occurrences, places, sound, within_window
from proofs.machine import NEXT, NOWHERE, Machine, Situation, Transitions
from proofs.theorem import Theorem
from spec import rank, samples
from spec.messages import (
    Arrived,
    Emit,
    Emitted,
    End,
    Event,
    Failed,
    Filter,
    Finished,
    GiveUp,
    InputEnded,
    Tallied,
    Totalled,
)
from spec.rank import (
    ACCEPTED_IN,
    Phase,
    RankState,
    Setup,
    Transition,
    has_spare,
    room_left,
)
from spec.samples import Sample
from spec.variants import machines

# ---------------------------------------------------------------- what is claimed of an event


def _before(situation: Situation) -> tuple[Setup, RankState, Event] | None:
    """A sound state with `x` where the numbers say, and the event; None if there is none."""
    setup, state = situation.setup(), situation.state()
    if not sound(setup, state):
        return None
    if places(situation.x, state) != (0 if situation.place == NOWHERE else 1):
        return None
    event = situation.event_for(state)
    if isinstance(event, Arrived) and len(event.samples) > room_left(setup, state):
        return None
    if isinstance(event, Tallied) and state.groups:
        in_envelope = setup.rules.target(event.tally) <= grouped_samples(state)
        if not in_envelope:
            return None
    if isinstance(event, Totalled):
        waiting = blocks_after(setup, state, event).waiting
        if not len(waiting) < setup.config.accumulation_steps:
            return None  # (blocks: exact-gradient)
    lacks_one = isinstance(event, Tallied) and not state.groups and not has_spare(state)
    if lacks_one and situation.tally.spare_missing == 0:
        return None  # the tally bounds what this rank has said
    return setup, state, event


def _transition(source: Source, machine: Machine) -> Callable[[], Any]:
    situation = Situation(source, machine)

    def claim() -> Any:
        there = _before(situation)
        if there is None:
            return OUTSIDE
        setup, state, event = there
        after, commands = machine.transition(setup, state, event)
        return Parts(
            identity_coverage=_accounts(situation, state, event, after, commands),
            bounded_memory=within_window(setup, after),
            uniform_abort=steps_first(setup, state, event, after, commands),
            deadlock_freedom=asks(setup, state, after, commands),
            step_alignment=both(
                follows(setup, state, event, after, commands),
                counts_on(setup, state, event, after),
            ),
            filtering=filters(setup, event, after, commands),
            invariant=sound(setup, after),
        )

    return claim


def _accounts(
    situation: Situation, state: RankState, event: Event, after: RankState, commands: Any
) -> Any:
    """`x` is in as many places as before, but for the ways in and out; and so many are the rest."""
    x = situation.x
    filtered = [c.sample for c in commands if isinstance(c, Filter)]
    had = 0 if situation.place == NOWHERE else 1
    out = occurrences(x, [filtered])
    left: Any = 0
    if isinstance(event, Arrived):
        had += occurrences(x, [event.samples])
        left = len(filtered) - len(event.samples)
    if isinstance(event, Emitted):
        out += situation.place == NEXT
        left = len(state.pending[0].group)
    return both(places(x, after) + out == had, held_samples(after) + left == held_samples(state))


def _finish(source: Source, machine: Machine) -> Callable[[], Any]:
    """`was failed`, `was closed`: what the rank's report of the round said of it. (That nobody
    wants a step when a join epoch finishes is part of target-envelope.)"""
    situation = Situation(source, machine)
    source.assume(both(situation.numbers["mode"] <= 1, situation.tally.want == 0))
    failed, closed = source.int("was failed"), source.int("was closed")
    for flag in (failed, closed):
        source.assume(both(flag >= 0, flag <= 1))
    tally, seat = situation.tally, situation.numbers["rank"]
    source.assume(implies(failed == 1, tally.failed_rank <= seat))
    source.assume(implies(closed == 1, tally.closed_rank <= seat))

    def claim() -> Any:
        there = _before(situation)
        if there is None:
            return OUTSIDE
        setup, state, event = there
        if state.groups:
            return OUTSIDE  # (the tally bounds the rank's own want)
        if not state.groups and len(state.window) >= 1 and failed == 0 and closed == 0:
            return OUTSIDE  # (a report of no groups, with samples held, says why)
        after, commands = machine.transition(setup, state, event)
        if not any(isinstance(c, End) and isinstance(c.outcome, Finished) for c in commands):
            return OUTSIDE
        return held_samples(after) == 0

    return claim


@dataclass(frozen=True)
class Beginning:
    """The function that begins an epoch."""

    start: Callable[[Setup, int], Transition] = rank.start


def _starts(source: Source, f: Beginning) -> Callable[[], Any]:
    situation = Situation(source, Machine(Phase.FILLING, Arrived))
    epoch = source.int("epoch")

    def claim() -> Any:
        setup = situation.setup()
        state, commands = f.start(setup, epoch)
        here = both(state.place.epoch == epoch, state.place.round == 0, state.place.step == 0)
        nothing = both(held_samples(state) == 0, state.arrived == 0, state.delivered == 0)
        pulls = bool(commands) and asks(setup, state, state, commands)
        return both(sound(setup, state), pulls, here, nothing)

    return claim


def _begins_late(setup: Setup, epoch: int) -> Transition:
    state, commands = rank.start(setup, epoch)
    return Transition(state._replace(place=state.place._replace(round=1)), commands)


@dataclass(frozen=True)
class Filtering:
    """The function that says which samples are filtered."""

    trainable: Callable[[Sample], bool] = samples.trainable


def _filters(source: Source, f: Filtering) -> Callable[[], Any]:
    cost, weight = source.int("cost"), source.int("weight")
    source.assume(both(cost >= 0, weight >= 0))

    def claim() -> Any:
        counts = bool(f.trainable(Sample(0, cost, weight)))
        worth = both(cost >= 1, weight >= 1)
        return worth if counts else negation(worth)

    return claim


# ---------------------------------------------------------------- mutants


def _changed(change: Callable[[RankState], RankState]) -> Transitions:
    def changed(setup: Setup, state: RankState, event: Event) -> Transition:
        after, commands = rank.transition(setup, state, event)
        return Transition(change(after), commands)

    return changed


def _loses_one(state: RankState) -> RankState:
    """Something of what is held is gone."""
    if state.window:
        return state._replace(window=state.window[1:])
    if state.waiting:
        return state._replace(waiting=state.waiting[1:])
    return state._replace(groups=state.groups[1:], pending=state.pending[1:])


def _forgets_earlier_steps(state: RankState) -> RankState:
    """A block that is emitted begins with its second step."""
    return state._replace(pending=state.pending[1:])


def _doubles_one(state: RankState) -> RankState:
    """One sample of the window, or of the round, is there twice."""
    again = state.window[:1] or tuple(s for group in state.groups[:1] for s in group)
    return state._replace(window=(*again, *state.window))


def _forgets_the_question(setup: Setup, state: RankState, event: Event) -> Transition:
    after, commands = rank.transition(setup, state, event)
    return Transition(after, commands[:-1] if len(commands) > 1 else (GiveUp(),))


def _skips_a_step(setup: Setup, state: RankState, event: Event) -> Transition:
    """The first of the steps that are due is left out."""
    after, commands = rank.transition(setup, state, event)
    if after.phase is not Phase.EMITTING or len(after.pending) < 2:
        return Transition(after, commands)
    put_back = tuple(s for s in after.pending[0].group)
    pending = after.pending[1:]
    after = after._replace(pending=pending, window=(*after.window, *put_back))
    return Transition(after, (*commands[:-1], Emit(pending[0])))


EVERYWHERE: dict[str, Transitions] = {
    "a sample is lost": _changed(_loses_one),
    "a sample is doubled": _changed(_doubles_one),
    "nothing is asked for": _forgets_the_question,
}
"""Mutants of every obligation."""

SOMEWHERE: dict[tuple[Phase, type[Event]], dict[str, Transitions]] = {
    (Phase.FILLING, InputEnded): {
        "the end discards a sample": machines.end_of_input_discards_the_window
    },
    (Phase.EMITTING, Failed): {
        "the batch's samples are forgotten": machines.forget_the_group_of_a_failed_batch,
    },
    (Phase.TOTALLING, Totalled): {
        "the block is emitted without what waited": _changed(_forgets_earlier_steps),
        "steps behind the quota are lost": machines.steps_behind_the_quota_lost,
        "a step is skipped": _skips_a_step,
    },
    (Phase.REPORTING, Tallied): {
        "the last block is left out": _changed(_forgets_earlier_steps),
        "the carry is dropped": machines.carry_dropped_at_the_end_of_input,
        "a retired rank leaves": machines.retired_ranks_leave,
        "a drained rank skips the counts": machines.idle_ranks_skip_the_counts,
        "a finished rank posts no counts": machines.finished_ranks_post_no_counts,
    },
}
"""Further ones: variants that the explorer knows, too."""


def _for_every_event() -> Iterator[Obligation]:
    for event, phases in ACCEPTED_IN.items():
        for phase in (p for p in Phase if p in phases):
            about = Machine(phase, event)
            mutants = {**EVERYWHERE, **SOMEWHERE.get((phase, event), {})}
            yield Obligation(
                f"transition ({event.__name__} while {phase.name.lower()})",
                "a sample in the rank's hands is in one place before and after, or leaves by the "
                "one way out; the rank holds no more than the window; it asks for one thing",
                _transition,
                about,
                {name: replace(about, transition=changed) for name, changed in mutants.items()},
            )


FINISHING = Machine(Phase.REPORTING, Tallied)

THEOREM = Theorem(
    promise="identity-coverage",
    states=(
        "Whatever happens to a rank, faults and stops included, in whatever order: every sample "
        "that has arrived is in exactly one place, until it is filtered (exactly if it cannot be "
        "trained on) or emitted, once; and when a join epoch finishes, none is held. On the way "
        "the rank never holds more than the window, beside fewer steps than a block has, which "
        "wait for the others of their block; after every event it waits for exactly one "
        "thing; its report says what it holds; it does what the decision says and nothing else; it "
        "emits the steps that were decided on, all of them, in their order and numbered on."
    ),
    assumes=(
        "Grouping, aligning, the draw, the quota and the target keep what is said of them "
        "(budget, alignment-succeeds, partition, quota-closure, target-envelope; the draw is "
        "tested), and blocks what exact-gradient says; any that do are put in their place. A block "
        "begins or ends at the step of x, or where its round does. A tally bounds what the rank's "
        "own report has said, and all ranks hold back as many steps (step-alignment). Samples "
        "arrive one or two at a time."
    ),
    reasoning=(
        "An arbitrary sample x is followed; everything else in the rank's hands is so many other "
        "samples, in so many groups. For each event in each phase that accepts it, from any state "
        "that satisfies the invariant, the loader's `transition` keeps the invariant, the number "
        "of places that hold x, and the number of samples held. The invariant holds at the start "
        "of an epoch, so by induction over events all of this holds in every state of every run. A "
        "rank that reports no group in a join epoch is drained or says that it has failed or "
        "stopped, and then the decision is not to finish."
    ),
    leaves_out=(
        "Longer batches of arrivals (each of their samples is looked at alike), and the order of "
        "what a rank holds besides x. That the shell emits what it is told to emit is tested on "
        "real ranks."
    ),
    obligations=(
        *_for_every_event(),
        Obligation(
            "start",
            "at the start of an epoch the rank holds nothing, and asks for samples",
            _starts,
            Beginning(),
            {
                "it begins in round 1": Beginning(_begins_late),
                "it asks for nothing": Beginning(
                    lambda setup, epoch: Transition(rank.start(setup, epoch).state, ())
                ),
            },
        ),
        Obligation(
            "filter",
            "a sample is filtered exactly if it has no tokens or no loss weight",
            _filters,
            Filtering(),
            {
                "nothing is filtered": Filtering(lambda sample: True),
                "empty samples are kept": Filtering(lambda sample: sample.weight > 0),
            },
        ),
        Obligation(
            "finish",
            "when a join epoch finishes, the rank holds nothing",
            _finish,
            FINISHING,
            {
                "a sample stays behind": replace(
                    FINISHING, transition=_changed(lambda s: s._replace(window=some_samples(1)))
                )
            },
        ),
    ),
)
