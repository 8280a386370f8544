"""A whole epoch of several ranks in one loop: the simplest environment that drives the machines.

Ranks influence each other only through the exchange, so running them side by side gives the same
steps as any other schedule (promise: determinism). The planner, the property tests and the
small-scope check of `model_check` use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce

from spec.config import Config
from spec.errors import ODBError
from spec.exchange import decode, encode, merge
from spec.messages import (
    Arrived,
    Command,
    Emit,
    Emitted,
    End,
    Event,
    Filter,
    InputEnded,
    Outcome,
    PostCounts,
    PostReport,
    Pull,
    Retire,
    Step,
    Tallied,
    Totalled,
)
from spec.rank import RankState, Rules, Setup, has_spare, held, start, transition
from spec.samples import Counts, Group, Sample, add_counts
from spec.world import SHIPPED as ODB
from spec.world import Machine


@dataclass
class RankRecord:
    """What happened on one rank.

    steps: in order. filtered: let go of. held: still in the window at the end. most_held: the most
    samples that it held at any time. entered: the round in which each sample arrived, by `seq`.
    formed: for each round the groups before alignment.
    retired_after: the number of its steps, if idle stop ended its iteration early.
    spareless: the idle steps for which it had no sample, neither its own nor a borrowed one.
    """

    steps: list[Step] = field(default_factory=list)
    filtered: list[Sample] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    formed: list[tuple[Group, ...]] = field(default_factory=list)
    held: tuple[Sample, ...] = ()
    most_held: int = 0
    retired_after: int | None = None
    spareless: list[int] = field(default_factory=list)
    outcome: Outcome | None = None


@dataclass
class EpochRecord:
    """What happened in one epoch, rank by rank. `rounds` counts the one that only ended it too."""

    ranks: list[RankRecord]
    rounds: int


class OutOfStepError(ODBError):
    """Ranks are in different exchanges, or do not come to an end: the protocol is broken."""


@dataclass(frozen=True)
class Play:
    """How an epoch is played. rules, machine: the protocol, to be replaced by variants. rounds: an
    epoch that takes more raises OutOfStepError."""

    rules: Rules = ODB
    machine: Machine = transition
    rounds: int | None = None


SHIPPED = Play()


class _Player:
    """One rank: performs every command that needs no other rank."""

    def __init__(
        self, setup: Setup, machine: Machine, shard: Sequence[Sample], record: RankRecord
    ) -> None:
        self.setup = setup
        self._machine = machine
        self.record = record
        self._shard = shard
        self._read = 0
        self._commands: list[Command] = []
        self.state: RankState
        self.state, commands = start(setup, epoch=0)
        self._commands.extend(commands)

    def feed(self, event: Event) -> None:
        self.state, commands = self._machine(self.setup, self.state, event)
        self._commands.extend(commands)

    def run(self) -> PostReport | PostCounts | End:
        """Perform commands up to the next one in which the other ranks take part."""
        while True:
            command = self._commands.pop(0)
            if isinstance(command, PostReport):
                self.record.formed.append(self.state.groups)
            if isinstance(command, PostReport | PostCounts | End):
                return command
            self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case Pull(limit):
                arrived = tuple(self._shard[self._read : self._read + limit])
                self._read += len(arrived)
                self.record.entered.extend([self.state.place.round] * len(arrived))
                self.feed(Arrived(arrived) if arrived else InputEnded())
                self.record.most_held = max(self.record.most_held, len(held(self.state)))
            case Emit(step):
                self.record.steps.append(step)
                if step.idle and not has_spare(self.state):
                    self.record.spareless.append(step.number)
                self.feed(Emitted())
            case Filter(sample):
                self.record.filtered.append(sample)
            case Retire():
                self.record.retired_after = len(self.record.steps)
            case _:
                pass


def run_epoch(
    config: Config, shards: Sequence[Sequence[Sample]], play: Play = SHIPPED
) -> EpochRecord:
    """Run one epoch over `shards`, one for each rank, and return what every rank did.

    Each shard's samples must be numbered from 0 in their `seq`. Raises OutOfStepError if ranks fall
    out of step, which those of the shipped protocol never do.
    """
    world_size = len(shards)
    records = [RankRecord() for _ in shards]
    players = [
        _Player(Setup(config, rank, world_size, play.rules), play.machine, shard, records[rank])
        for rank, shard in enumerate(shards)
    ]
    rounds = 0
    while True:
        commands = [player.run() for player in players]
        if all(isinstance(command, End) for command in commands):
            break
        rounds += 1
        tallies = [c.tally for c in commands if isinstance(c, PostReport)]
        counts = [c.counts for c in commands if isinstance(c, PostCounts)]
        event: Event
        if len(tallies) == world_size:
            event = Tallied(decode(encode(reduce(merge, tallies))))
        elif len(counts) == world_size:
            rounds -= 1  # the second exchange of a round that was counted at the first
            if len({len(of_rank) for of_rank in counts}) > 1:
                raise OutOfStepError("ranks post counts for different numbers of steps")
            event = Totalled(tuple(_totals(counts)))
        else:
            raise OutOfStepError(f"ranks are in different exchanges: {commands}")
        if play.rounds is not None and rounds > play.rounds:
            raise OutOfStepError(f"the epoch has not ended after {play.rounds} rounds")
        for player in players:
            player.feed(event)
    for player, command in zip(players, commands, strict=True):
        assert isinstance(command, End)
        player.record.held = player.state.window
        player.record.outcome = command.outcome
    return EpochRecord(records, rounds)


def _totals(counts: Sequence[tuple[Counts, ...]]) -> Iterator[Counts]:
    for of_step in zip(*counts, strict=True):
        yield reduce(add_counts, of_step)
