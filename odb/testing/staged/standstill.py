"""Lets go of all staged ranks, to see whether they come to a standstill, and who waits where."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from odb.testing.staged.rank import Answer, StagedRank
from odb.testing.staged.stage import Stage, Standing, stack_of
from spec.world import Activity, World


@dataclass(frozen=True)
class Waiting:
    """A thread that waits. where: the line of odb in which it does. stack: all of it."""

    who: str
    where: str
    stack: str


@dataclass(frozen=True)
class Standstill:
    """What became of ranks that nobody holds back: nothing has moved for `seconds`. `waiting` is
    empty if all are through; else it says who waits where. moved: whether anything did at all."""

    waiting: tuple[Waiting, ...]
    moved: bool
    seconds: float

    @property
    def deadlock(self) -> bool:
        """Whether somebody waits although nobody moves, and nobody did."""
        return bool(self.waiting) and not self.moved

    def __str__(self) -> str:
        if not self.waiting:
            return "all ranks are through"
        return "; ".join(f"{entry.who} waits {entry.where}" for entry in self.waiting)


def let_go(stage: Stage, world: World, ranks: Sequence[StagedRank], seconds: float) -> Standstill:
    """Have every driver perform the command at hand, and every trainer ask for what comes next.

    A driver that is about to read is left alone: what it would read is not known. No exchange and
    no gradient is completed; the caller does this only where none could be.
    """
    asked: list[tuple[StagedRank, Answer]] = []
    drivers: list[StagedRank] = []
    for rank in ranks:
        if not rank.alive:
            continue
        drivers.append(rank)
        if rank.actor.standing is Standing.BEFORE:
            rank.actor.go_on()
        if rank.taken.activity is Activity.READY:
            asked.append((rank, rank.next()))
        elif rank.taken.activity in (Activity.DONE, Activity.STOPPED):
            assert rank.actor.state is not None
            if rank.actor.state.place.epoch + 1 < world.epochs:
                asked.append((rank, rank.begin()))
    moves = stage.moves
    moved = _until_quiet(stage, seconds)
    waiting = [_waiting(rank.thread) for rank, answer in asked if not answer.done]
    waiting += [
        Waiting(f"rank {rank.seat.rank} trainer", "in the gradient of its step", "")
        for rank in drivers
        if rank.taken.activity is Activity.IN_GRADIENT
    ]
    for rank in drivers:
        thread = rank.actor.thread
        if thread is not None and thread.is_alive():
            waiting.append(_waiting(thread, f"rank {rank.seat.rank} driver"))
    answered = any(answer.done for _, answer in asked)
    return Standstill(tuple(waiting), moved or answered or stage.moves != moves, seconds)


def _until_quiet(stage: Stage, seconds: float) -> bool:
    """Wait until nothing has moved for so long; whether anything did."""
    ever = False
    with stage.changed:
        while True:
            before, deadline = stage.moves, time.monotonic() + seconds
            if not stage.changed.wait_for(
                lambda before=before: stage.moves != before,  # type: ignore[misc]
                max(0.0, deadline - time.monotonic()),
            ):
                return ever
            ever = True


def _waiting(thread: threading.Thread, who: str | None = None) -> Waiting:
    stack = stack_of(thread)
    lines = [line.strip() for line in stack.splitlines() if "File" in line]
    ours = [line for line in lines if "/odb/" in line and "/odb/testing/" not in line]
    where = ours[-1].rsplit("/odb/", 1)[-1].replace('"', "") if ours else "outside of odb"
    return Waiting(who or thread.name, f"in odb/{where}" if ours else where, stack)
