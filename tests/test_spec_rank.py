"""The state machine of one rank, told as traces."""

from __future__ import annotations

import pytest

from spec.config import Budget, Config, Idle, Mode, Place
from spec.errors import IllegalEventError
from spec.exchange import Tally
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
    PeerLost,
    PostCounts,
    PostReport,
    Pull,
    Retire,
    ShareReason,
    ShareSpare,
    Tallied,
    Totalled,
)
from spec.rank import ACCEPTED_IN, Phase, RankState, Setup, held, start, transition
from spec.samples import Counts, Sample

CONFIG = Config(Budget(8), window=4, slow_start=2)


class Rank:
    """A rank in a test: remembers the commands of its latest transition."""

    def __init__(self, config: Config = CONFIG, world_size: int = 2, epoch: int = 0) -> None:
        self.setup = Setup(config, 0, world_size)
        self.state: RankState
        self.commands: tuple[Command, ...]
        self.state, self.commands = start(self.setup, epoch)

    def on(self, event: Event) -> tuple[Command, ...]:
        self.state, self.commands = transition(self.setup, self.state, event)
        return self.commands

    def arrive(self, *costs: int) -> tuple[Command, ...]:
        first = self.state.arrived
        return self.on(Arrived(tuple(Sample(first + i, c, c) for i, c in enumerate(costs))))

    @property
    def posted(self) -> Tally:
        (command,) = (c for c in self.commands if isinstance(c, PostReport))
        return command.tally

    def tallied(self, **changes: object) -> tuple[Command, ...]:
        return self.on(Tallied(self.posted._replace(**changes)))

    def totalled(self, *extra_samples: int) -> tuple[Command, ...]:
        (command,) = (c for c in self.commands if isinstance(c, PostCounts))
        extra = extra_samples or (0,) * len(command.counts)
        return self.on(
            Totalled(
                tuple(
                    Counts(c.samples + n, c.tokens + n, c.weight + n)
                    for c, n in zip(command.counts, extra, strict=True)
                )
            )
        )


def test_a_round_from_the_first_pull_to_the_next() -> None:
    rank = Rank()
    assert rank.commands == (Pull(2),)  # slow start: half a window
    assert rank.arrive(3) == (KeepSpare(Sample(0, 3, 3)), Pull(1))
    rank.arrive(5)
    assert rank.state.phase is Phase.REPORTING
    assert (rank.posted.want, rank.posted.limit) == (2, 2)

    rank.tallied()
    # Groups are formed longest first; the shared draw of this round puts the shorter one first.
    assert rank.commands == (PostCounts((Counts(1, 3, 3), Counts(1, 5, 5))),)
    (emit,) = rank.totalled(1, 0)
    assert isinstance(emit, Emit)
    assert (emit.step.number, emit.step.local, emit.step.total) == (
        0,
        Counts(1, 3, 3),
        Counts(2, 4, 4),
    )
    (emit,) = rank.on(Emitted())
    assert isinstance(emit, Emit)
    assert emit.step.number == 1
    assert rank.on(Emitted()) == (Pull(4),)
    assert rank.state.place == Place(epoch=0, round=1, step=2)
    assert rank.on(InputEnded()) == rank.commands
    assert rank.posted.want == 0
    assert rank.tallied() == (End(Finished()),)


def test_samples_without_tokens_or_weight_are_filtered_and_take_no_room() -> None:
    rank = Rank()
    zero, weightless = Sample(0, 0, 0), Sample(1, 5, 0)
    commands = rank.on(Arrived((zero, weightless)))
    assert commands == (Filter(zero), Filter(weightless), Pull(2))
    assert held(rank.state) == ()


def test_the_cheapest_sample_is_the_spare_and_outlives_its_step() -> None:
    rank = Rank(world_size=1)
    assert KeepSpare(Sample(1, 2, 2)) in rank.arrive(6, 2)
    rank.tallied()
    rank.totalled()
    while isinstance(rank.commands[0], Emit):
        rank.on(Emitted())
    assert KeepSpare not in map(type, rank.arrive(2, 3, 4))  # not cheaper
    assert rank.state.spare == Sample(1, 2, 2)


def test_a_drained_rank_idles_through_the_round() -> None:
    rank = Rank()
    rank.arrive(3)
    rank.on(InputEnded())
    rank.tallied()
    rank.totalled()
    rank.on(Emitted())
    assert (rank.posted.want, rank.posted.limit) == (0, CONFIG.window)
    assert rank.tallied(want=2, limit=3) == (PostCounts((Counts(0, 0, 0),) * 2),)
    (emit,) = rank.totalled(4, 4)
    assert isinstance(emit, Emit)
    assert emit.step.idle


def test_a_rank_that_never_saw_a_sample_borrows_a_spare_once() -> None:
    rank = Rank()
    rank.on(InputEnded())
    assert rank.posted.spare_missing
    assert rank.tallied(want=1, limit=1, spare_from=1)[0] == ShareSpare(1)
    rank.totalled(4)
    rank.on(Emitted())
    assert not rank.posted.spare_missing


def test_idle_stop_retires_the_trainer_and_goes_on_exchanging() -> None:
    rank = Rank(Config(Budget(8), window=4, slow_start=2, idle=Idle.STOP))
    rank.on(InputEnded())
    assert rank.tallied(want=1, limit=1)[0] == Retire()
    assert isinstance(rank.totalled(4)[0], PostReport)
    assert rank.on(Closed()) == ()  # the trainer's farewell is no early stop: nothing is posted
    report = rank.setup, rank.state
    assert report[1].phase is Phase.REPORTING


def test_a_trainer_that_stops_is_reported_and_ends_the_epoch_for_all() -> None:
    rank = Rank()
    rank.arrive(3, 5)
    rank.tallied()
    rank.totalled()
    commands = rank.on(Closed())
    assert isinstance(commands[0], PostReport)
    assert rank.posted.closed_rank == 0
    assert rank.tallied() == (End(ClosedBy(0)),)
    assert [s.cost for s in held(rank.state)] == [3, 5]  # not delivered, not lost


def test_a_failing_input_is_reported_behind_the_steps_already_aligned() -> None:
    rank = Rank()
    rank.arrive(3)
    rank.on(Failed())
    assert rank.posted.failed_rank == 0
    assert rank.tallied() == (ShareReason(0), End(AbortedBy(0)))


def test_a_batch_that_cannot_be_made_turns_the_rest_of_the_round_idle() -> None:
    rank = Rank()
    rank.arrive(3, 5)
    rank.tallied()
    rank.totalled()
    (emit,) = rank.on(Failed())
    assert isinstance(emit, Emit)
    assert (emit.step.number, emit.step.idle) == (0, True)
    (emit,) = rank.on(Emitted())
    assert isinstance(emit, Emit)
    assert (emit.step.number, emit.step.idle) == (1, True)
    rank.on(Emitted())
    assert rank.posted.failed_rank == 0
    assert [s.cost for s in held(rank.state)] == [3, 5]


def test_not_even_idle_steps_can_be_made() -> None:
    rank = Rank()
    rank.arrive(3, 5)
    rank.tallied()
    rank.totalled()
    rank.on(Failed())
    give_up, report = rank.on(Failed())
    assert give_up == GiveUp()  # its own trainer learns it at once, the others in the next round
    assert isinstance(report, PostReport)


def test_a_met_quota_withdraws_the_steps_behind_it() -> None:
    rank = Rank(Config(Budget(4), window=4, slow_start=4, mode=Mode.QUOTA, quota=3))
    rank.arrive(4, 4, 4, 4)
    rank.tallied()
    rank.totalled(1, 1, 1, 1)  # two samples in each step: the second meets the quota
    rank.on(Emitted())
    rank.on(Emitted())
    assert rank.posted.want == 0
    assert rank.state.delivered == 4
    assert len(held(rank.state)) == 2
    assert rank.state.place.step == 2


def test_a_lost_peer_and_a_mismatch_end_the_epoch() -> None:
    rank = Rank()
    rank.on(InputEnded())
    other = rank.posted.high._replace(window=9)
    assert rank.tallied(high=other) == (End(Mismatched("window", 4, 9)),)
    rank = Rank()
    rank.on(InputEnded())
    assert rank.on(PeerLost(1)) == (End(Lost(1)),)


def test_a_lost_peer_ends_the_epoch_in_any_phase_and_leaves_no_sample_behind() -> None:
    filling = Rank()
    filling.arrive(3)
    assert filling.commands[-1:] == (Pull(1),)
    assert filling.on(PeerLost(1)) == (End(Lost(1)),)
    assert len(held(filling.state)) == 1
    emitting = Rank()
    emitting.arrive(3, 5)
    emitting.tallied()
    (emit,) = emitting.totalled()
    assert isinstance(emit, Emit)
    assert emitting.on(PeerLost(None)) == (End(Lost(None)),)
    assert [s.cost for s in held(emitting.state)] == [3, 5]
    with pytest.raises(IllegalEventError):
        emitting.on(PeerLost(None))  # it has ended


EVENTS: list[Event] = [
    Arrived((Sample(0, 1, 1),)),
    InputEnded(),
    Failed(),
    Closed(),
    Totalled(()),
    Emitted(),
    PeerLost(None),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("phase", Phase)
def test_an_event_out_of_place_changes_nothing(event: Event, phase: Phase) -> None:
    if phase in ACCEPTED_IN[type(event)]:
        return
    state = RankState(phase, Place(0, 0, 0))
    with pytest.raises(IllegalEventError, match=type(event).__name__):
        transition(Setup(CONFIG, 0, 1), state, event)


def test_samples_must_be_numbered_on_and_totals_must_fit() -> None:
    rank = Rank()
    with pytest.raises(IllegalEventError, match="numbered from 0"):
        rank.on(Arrived((Sample(1, 1, 1),)))
    with pytest.raises(IllegalEventError, match="3 samples where 2 were asked for"):
        rank.arrive(1, 2, 3)
    rank.arrive(3, 5)
    rank.tallied()
    with pytest.raises(IllegalEventError, match="1 totals for 2 steps"):
        rank.on(Totalled((Counts(1, 1, 1),)))
