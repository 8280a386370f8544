"""Chooses what happens next in a simulated run: who is fast, who is slow, and what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from random import Random

from model_check.live import Live
from spec.world import (
    Action,
    BreakGradient,
    Deliver,
    EndInput,
    HearOfFailure,
    NextEpoch,
    SeeEnd,
    StopEarly,
    TakeStep,
)


class Policy(Enum):
    """How ranks take turns."""

    UNIFORM = "any rank is as likely as any other"
    SLOW_RANKS = "some ranks act only when nobody else can"
    BURSTS = "a rank acts many times in a row"
    IN_TURN = "a rank acts until it cannot, then the next one does"
    LATE_TRAINERS = "trainers act when batchers cannot"
    LATE_BATCHERS = "batchers act when trainers cannot"


TRAINER_ACTIONS = (TakeStep, SeeEnd, BreakGradient, StopEarly, NextEpoch, HearOfFailure)


class Scheduler:
    """Chooses the actions of one run, by a policy of its own drawing."""

    def __init__(self, live: Live, rng: Random) -> None:
        ranks = live.world.world_size
        self.live = live
        self.rng = rng
        self.policy = rng.choice(tuple(Policy))
        self.slow = frozenset(rng.sample(range(ranks), rng.randint(1, max(1, ranks // 4))))
        self.current = 0
        # Rarely in long runs, often in short ones: a fault should come early, late, or never.
        self.mishap = 10.0 ** -rng.uniform(0.5, 1 + len(str(ranks * live.world.samples)))
        shards = rng.choice(SHARDS)
        self.ends = [rng.choice(shards) for _ in range(ranks)]

    def choose(self) -> Action | None:
        """The next action, or None if nothing can happen unless it goes wrong."""
        live, rng = self.live, self.rng
        if rng.random() < self.mishap:
            mishaps = live.mishaps(rng.randrange(live.world.world_size))
            if mishaps:
                return rng.choice(mishaps)
        meetings = live.meetings()
        if not live.ready:
            return rng.choice(meetings) if meetings else None
        if meetings and rng.randrange(len(live.ready) + len(meetings)) < len(meetings):
            return rng.choice(meetings)
        self.current = self._rank(live.ready)
        return self._action(self.current)

    def _rank(self, ready: Sequence[int]) -> int:
        rng = self.rng
        if self.policy is Policy.IN_TURN:
            ranks = self.live.world.world_size
            return min(ready, key=lambda rank: (rank - self.current) % ranks)
        if self.policy is Policy.BURSTS and rng.random() < 0.9 and self.live.usual(self.current):
            return self.current
        # A policy that prefers some ranks looks for one of them, but not for long.
        for _ in range(TRIES):
            rank = rng.choice(ready)
            if self._preferred(rank):
                return rank
        return rng.choice(ready)

    def _preferred(self, rank: int) -> tuple[Action, ...]:
        """Those of a rank's actions that the policy would have happen first."""
        usual = self.live.usual(rank)
        match self.policy:
            case Policy.SLOW_RANKS:
                return () if rank in self.slow else usual
            case Policy.LATE_TRAINERS:
                return tuple(a for a in usual if not isinstance(a, TRAINER_ACTIONS))
            case Policy.LATE_BATCHERS:
                return tuple(a for a in usual if isinstance(a, TRAINER_ACTIONS))
            case _:
                return usual

    def _action(self, rank: int) -> Action:
        rng = self.rng
        options = self._preferred(rank) or self.live.usual(rank)
        samples = [action for action in options if isinstance(action, Deliver)]
        if samples and EndInput(rank) in options:
            return EndInput(rank) if rng.random() < self.ends[rank] else rng.choice(samples)
        return rng.choice(options)


TRIES = 8

SHARDS = ((0.0,), (0.0, 0.05), (0.1,), (0.0, 0.05, 0.3, 1.0))
"""How likely an input is to end before each sample, in a run: all shards are full; nearly so; they
differ; some are empty, others full."""
