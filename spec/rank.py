"""The state machine of one rank: `transition(setup, state, event) -> (state, commands)`.

All of the protocol is here and in the functions that this module calls; whoever drives the machine
only performs commands (see `spec.messages`). One round goes

    FILLING --window full--> REPORTING --decision--> TOTALLING --totals--> EMITTING --> FILLING

and ENDED is reached from REPORTING alone, where all ranks take the same decision at the same step
(or from anywhere, once a peer is lost). An event that the phase does not accept raises and leaves
the state as it was. A sample that has arrived and was not filtered is in exactly one place:
`window`, `groups`, `waiting`, `pending`, or emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from spec import alignment, blocks, config, draw, exchange, grouping, quota, samples
from spec.alignment import Alignment
from spec.blocks import Gathered
from spec.config import Budget, Config, Idle, Place, terms_of
from spec.errors import IllegalEventError
from spec.exchange import Abort, Close, Decision, Finish, Flush, Mismatch, Report, Steps, Tally
from spec.messages import (
    AbortedBy,
    Arrived,
    Closed,
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
    InputEnded,
    KeepSpare,
    Lost,
    Mismatched,
    Outcome,
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
from spec.quota import Progress, quota_met
from spec.samples import NOTHING, Counts, Group, Sample, counts_of, in_arrival_order


class Phase(Enum):
    """What the rank is doing."""

    FILLING = "filling its window"
    REPORTING = "waiting for the other ranks' reports"
    TOTALLING = "waiting for the other ranks' counts"
    EMITTING = "emitting the steps of the round"
    ENDED = "done with the epoch"


class Input(Enum):
    """What is known of the rank's input."""

    OPEN = "open"
    ENDED = "ended"
    FAILED = "failed"


class Trainer(Enum):
    """Whether anybody takes the rank's steps."""

    SERVED = "takes steps"
    RETIRED = "was told that its steps are over (idle stop)"
    STOPPED = "stopped early"


@dataclass(frozen=True)
class Rules:
    """The replaceable parts of the protocol. A target policy inside the safe envelope is as good as
    any other; replacing anything else serves to check that the promises notice (see
    `spec.variants`)."""

    trainable: Callable[[Sample], bool] = samples.trainable
    fill_target: Callable[[Config, int], int] = config.fill_target
    group: Callable[[Budget, tuple[Sample, ...]], tuple[Group, ...]] = grouping.group
    target: Callable[[Tally], int] = exchange.paper_target
    decide: Callable[[Config, int, Tally, int], Decision] = exchange.decide
    align: Callable[[tuple[Group, ...], int], Alignment] = alignment.align
    arrange: Callable[[tuple[Group, ...], tuple[int, ...]], tuple[Group, ...]] = draw.arrange
    take_steps: Callable[[Config, int, tuple[Counts, ...]], Progress] = quota.take_steps
    gather: Callable[[Config, tuple[Step, ...], tuple[Step, ...]], Gathered] = blocks.gather
    complete: Callable[[tuple[Step, ...]], tuple[Step, ...]] = blocks.complete


@dataclass(frozen=True)
class Setup:
    """What does not change during an epoch: the configuration and this rank's seat."""

    config: Config
    rank: int
    world_size: int
    rules: Rules = Rules()


class RankState(NamedTuple):
    """Everything that one rank's protocol remembers.

    place: epoch, round, and the number of the next step to be decided on.
    window: samples that have arrived and are in no group yet, oldest first.
    groups: while exchanging, the groups of the round: as formed, then as aligned.
    waiting: steps decided on, whose block is not complete.
    pending: steps of complete blocks, not yet emitted; the first is the one at hand.
    arrived: how many samples have arrived, so the `seq` of the next one.
    spare: the cheapest sample seen. donor: the rank whose spare serves, if there was none.
    delivered: samples in all steps decided on so far, of all ranks together.
    """

    phase: Phase
    place: Place
    input: Input = Input.OPEN
    trainer: Trainer = Trainer.SERVED
    window: tuple[Sample, ...] = ()
    groups: tuple[Group, ...] = ()
    waiting: tuple[Step, ...] = ()
    pending: tuple[Step, ...] = ()
    arrived: int = 0
    spare: Sample | None = None
    donor: int | None = None
    delivered: int = 0


class Transition(NamedTuple):
    """The next state, and the commands to perform in this order."""

    state: RankState
    commands: tuple[Command, ...]


def start(setup: Setup, epoch: int) -> Transition:
    """A rank at the start of an epoch."""
    return _fill(setup, RankState(Phase.FILLING, Place(epoch, 0, 0)))


def transition(setup: Setup, state: RankState, event: Event) -> Transition:
    """The one way in which a rank's state changes.

    Raises IllegalEventError, and changes nothing, for an event that the phase does not accept.
    """
    check(setup, state, event)
    match event:
        case Arrived(arrived):
            return _arrive(setup, state, arrived)
        case InputEnded():
            return _fill(setup, state._replace(input=Input.ENDED))
        case Failed():
            return _fail(setup, state)
        case Closed():
            return _close(setup, state)
        case Tallied(tally):
            return _follow(setup, state, tally)
        case Totalled(totals):
            return _number(setup, state, totals)
        case Emitted():
            return _emit(setup, state._replace(pending=state.pending[1:]))
        case PeerLost(rank):
            return _end(state, Lost(rank))


ACCEPTED_IN: dict[type[Event], frozenset[Phase]] = {
    Arrived: frozenset({Phase.FILLING}),
    InputEnded: frozenset({Phase.FILLING}),
    Failed: frozenset({Phase.FILLING, Phase.EMITTING}),
    Closed: frozenset(Phase) - {Phase.ENDED},
    Tallied: frozenset({Phase.REPORTING}),
    Totalled: frozenset({Phase.TOTALLING}),
    Emitted: frozenset({Phase.EMITTING}),
    PeerLost: frozenset(Phase) - {Phase.ENDED},
}
"""The phases in which each event may come."""


def check(setup: Setup, state: RankState, event: Event) -> None:
    """Raise IllegalEventError if the event may not come now."""
    if state.phase not in ACCEPTED_IN[type(event)]:
        raise IllegalEventError(f"{type(event).__name__} while the rank is {state.phase.value}")
    match event:
        case Arrived(arrived):
            expected = tuple(range(state.arrived, state.arrived + len(arrived)))
            if not arrived or tuple(s.seq for s in arrived) != expected:
                raise IllegalEventError(f"expected samples numbered from {state.arrived}")
            if len(arrived) > room_left(setup, state):
                raise IllegalEventError(
                    f"{len(arrived)} samples where {room_left(setup, state)} were asked for"
                )
        case Totalled(totals) if len(totals) != len(state.groups):
            raise IllegalEventError(f"{len(totals)} totals for {len(state.groups)} steps")
        case _:
            pass


# ---------------------------------------------------------------- filling


def _fill(setup: Setup, state: RankState) -> Transition:
    """Ask for samples until the window holds what this round waits for, then report."""
    state = state._replace(phase=Phase.FILLING)
    room = room_left(setup, state)
    if room > 0 and state.input is Input.OPEN and _wants_samples(setup, state):
        return Transition(state, (Pull(room),))
    return _report(setup, state)


def room_left(setup: Setup, state: RankState) -> int:
    """How many samples the window still waits for in this round."""
    return setup.rules.fill_target(setup.config, state.place.round) - len(state.window)


def _wants_samples(setup: Setup, state: RankState) -> bool:
    """Whether the rank would train on more samples: it is sound, it has somebody to train, and the
    quota is not met."""
    sound = state.input is not Input.FAILED and state.trainer is not Trainer.STOPPED
    return sound and not quota_met(setup.config, state.delivered)


def _arrive(setup: Setup, state: RankState, arrived: Group) -> Transition:
    trainable = setup.rules.trainable
    commands: list[Command] = [Filter(s) for s in arrived if not trainable(s)]
    kept = tuple(s for s in arrived if trainable(s))
    spare = state.spare
    if kept:
        cheapest = min(kept, key=lambda s: (s.cost, s.seq))
        if spare is None or cheapest.cost < spare.cost:
            spare = cheapest
            commands.append(KeepSpare(spare))
    state = state._replace(
        window=state.window + kept, arrived=state.arrived + len(arrived), spare=spare
    )
    state, more = _fill(setup, state)
    return Transition(state, (*commands, *more))


def _report(setup: Setup, state: RankState) -> Transition:
    groups: tuple[Group, ...] = ()
    if _wants_samples(setup, state):
        groups = setup.rules.group(setup.config.budget, state.window)
    report = Report(
        terms=terms_of(setup.config, state.place),
        want=len(groups),
        limit=len(state.window) if groups else setup.config.window,
        has_spare=has_spare(state),
        waiting=bool(state.waiting),
        failed=state.input is Input.FAILED,
        closed=state.trainer is Trainer.STOPPED,
    )
    tally = exchange.tally_of(report, setup.rank, setup.world_size)
    window = () if groups else state.window
    state = state._replace(phase=Phase.REPORTING, window=window, groups=groups)
    return Transition(state, (PostReport(tally),))


def has_spare(state: RankState) -> bool:
    """Whether the rank has a sample, its own or a borrowed one, to make idle steps of."""
    return state.spare is not None or state.donor is not None


def held(state: RankState) -> Group:
    """Every sample that has arrived, was not filtered and has not been emitted, oldest first."""
    decided = (step.group for step in (*state.waiting, *state.pending))
    return in_arrival_order((state.window, *state.groups, *decided))


# ---------------------------------------------------------------- the round


def _follow(setup: Setup, state: RankState, tally: Tally) -> Transition:
    """Take the decision that every rank takes, and do this rank's part of it."""
    target = setup.rules.target(tally)
    match setup.rules.decide(setup.config, setup.world_size, tally, target):
        case Steps(target, donor):
            return _align(setup, state, target, donor)
        case Flush():
            return _flush(setup, state)
        case Finish():
            return _end(state, Finished())
        case Close(rank):
            return _end(state, ClosedBy(rank))
        case Abort(rank):
            ended, commands = _end(state, AbortedBy(rank))
            return Transition(ended, (ShareReason(rank), *commands))
        case Mismatch(term, low, high):
            return _end(state, Mismatched(term, low, high))


def _align(setup: Setup, state: RankState, target: int, donor: int | None) -> Transition:
    commands: list[Command] = []
    if state.groups:
        groups, window = setup.rules.align(state.groups, target)
        # The same draw on all ranks: groups of similar length stay side by side in a step, so
        # that no rank waits long for another, and training does not see lengths in order.
        key = (setup.config.seed, state.place.epoch, state.place.round)
        groups = setup.rules.arrange(groups, key)
    else:
        groups, window = ((),) * target, state.window
        if setup.config.idle is Idle.STOP and state.trainer is Trainer.SERVED:
            state = state._replace(trainer=Trainer.RETIRED)
            commands.append(Retire())
    if donor is not None:
        commands.append(ShareSpare(donor))
        if not has_spare(state):
            state = state._replace(donor=donor)
    commands.append(PostCounts(tuple(counts_of(group) for group in groups)))
    state = state._replace(phase=Phase.TOTALLING, groups=groups, window=window)
    return Transition(state, tuple(commands))


def _number(setup: Setup, state: RankState, totals: tuple[Counts, ...]) -> Transition:
    """Number the steps of the round, find out whether one of them closes the quota, and which
    blocks are complete with them."""
    place = state.place
    count, delivered = setup.rules.take_steps(setup.config, state.delivered, totals)
    taken = zip(state.groups[:count], totals, strict=False)
    decided = tuple(
        Step(place.step + i, place.round, group, counts_of(group), total)
        for i, (group, total) in enumerate(taken)
    )
    ready, waiting = setup.rules.gather(setup.config, state.waiting, decided)
    state = state._replace(
        phase=Phase.EMITTING,
        place=Place(place.epoch, place.round + 1, place.step + count),
        window=in_arrival_order((state.window, *state.groups[count:])),
        groups=(),
        waiting=waiting,
        pending=ready,
        delivered=delivered,
    )
    return _emit(setup, state)


def _flush(setup: Setup, state: RankState) -> Transition:
    """Emit what waits as a last, shorter block. Nobody reads on: the epoch ends in the next
    round, which is held so that a rank whose batch fails in this block can still say so."""
    place = state.place
    state = state._replace(
        phase=Phase.EMITTING,
        place=place._replace(round=place.round + 1),
        input=Input.ENDED,
        window=in_arrival_order((state.window, *state.groups)),
        groups=(),
        waiting=(),
        pending=setup.rules.complete(state.waiting),
    )
    return _emit(setup, state)


# ---------------------------------------------------------------- emitting


def _emit(setup: Setup, state: RankState) -> Transition:
    """Emit the next step; behind the last one, go on to the next round."""
    if state.pending and state.trainer is Trainer.SERVED:
        return Transition(state, (Emit(state.pending[0]),))
    # What a stopped trainer did not take goes back to the window: held, not lost. (A retired
    # rank's steps are all idle.)
    return _fill(setup, _withdraw(state))


def _withdraw(state: RankState) -> RankState:
    """Put the samples of steps that will not be emitted back into the window."""
    pending = (step.group for step in state.pending)
    return state._replace(window=in_arrival_order((state.window, *pending)), pending=())


def _fail(setup: Setup, state: RankState) -> Transition:
    """Read no more. Steps that were decided on become idle, so that nobody waits for this rank in
    a gradient, and the next report says that it failed. If not even an idle step can be made, or
    there is nobody to wait, nothing more is emitted."""
    state = state._replace(input=Input.FAILED)
    if state.phase is Phase.FILLING:
        return _fill(setup, state)
    if state.pending[0].idle or setup.world_size == 1:
        state, commands = _emit(setup, _withdraw(state))
        return Transition(state, (GiveUp(), *commands))
    idle = tuple(step._replace(group=(), local=NOTHING) for step in state.pending)
    return _emit(setup, _withdraw(state)._replace(pending=idle))


def _close(setup: Setup, state: RankState) -> Transition:
    """The trainer takes no more steps: say so in the next report. A rank that has retired from the
    epoch has nothing to stop."""
    if state.trainer is Trainer.RETIRED:
        return Transition(state, ())
    state = state._replace(trainer=Trainer.STOPPED)
    if state.phase is Phase.FILLING:
        return _fill(setup, state)
    if state.phase is Phase.EMITTING:
        return _emit(setup, state)
    return Transition(state, ())


def _end(state: RankState, outcome: Outcome) -> Transition:
    """The epoch is over, behind the last block that was complete: steps that still wait for theirs
    do not count, and their samples are held."""
    place = state.place._replace(step=state.place.step - len(state.waiting))
    state = state._replace(
        phase=Phase.ENDED, place=place, window=held(state), groups=(), waiting=(), pending=()
    )
    return Transition(state, (End(outcome),))
