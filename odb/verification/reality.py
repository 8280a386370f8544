"""Model and reality: the real loader is taken through runs of the closed system, step by step.

Runs of the shipped protocol must be followed exactly: after every action, what is seen of the real
loader equals the state of the model. And a variant must fall in the real loader too, by the run by
which it falls in the model, judged on what the real loader did.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from model_check.end_promises import END_PROMISES
from model_check.explorer import Broken
from model_check.live import RAISED, longest_run
from model_check.mutants import MutantResult
from model_check.node_promises import broken_by
from odb.testing.staged import StagedJob, Standstill
from odb.testing.variants import protocol
from odb.verification.differences import PARTING_VARIANTS
from odb.verification.outward import outward
from spec.enabled import actions
from spec.errors import ODBError
from spec.system import act, fresh
from spec.world import FAITHFUL, SHIPPED, Action, Deliver, NextEpoch, Node, State, World


@dataclass(frozen=True)
class Difference:
    """Where the real loader and the model part: after which action (-1: at the start), on which
    rank, and each field in which they differ, as (real, model)."""

    number: int
    action: Action | None
    rank: int
    fields: tuple[tuple[str, Any, Any], ...]

    def __str__(self) -> str:
        parts = "; ".join(
            f"{name}: really {real}, in the model {model}" for name, real, model in self.fields
        )
        return f"after action {self.number} ({self.action}), rank {self.rank}: {parts}"


@dataclass(frozen=True)
class Followed:
    """How far the real loader followed a run. `actions`: how many. difference: where it does
    something else. broken: a promise that the real loader did not keep."""

    actions: int
    difference: Difference | None = None
    broken: Broken | None = None

    @property
    def exactly(self) -> bool:
        """Whether it did the same all the way, and kept every promise."""
        return self.difference is None and self.broken is None


class Follower:
    """A staged job, and the state in which the model has it."""

    def __init__(self, world: World, start: State, job: StagedJob) -> None:
        self.job = job
        setup = job.ranks[0].setup
        assert setup is not None
        # The loader adds a digest of its own settings, which ranks compare.
        self.world = replace(world, config=setup.config)
        config = replace(setup.config, settings=world.config.settings)
        if config != world.config:
            raise ODBError(f"the loader is configured as {config}, the model as {world.config}")
        nodes = tuple(fresh(self.world, rank, 0) for rank in range(world.world_size))
        self.state = start._replace(nodes=nodes)
        self.performed = 0
        self.difference = self._compare(None)

    def perform(self, action: Action) -> Broken | None:
        """Have an action happen in both; what the real loader breaks by it."""
        raised: Exception | None = None
        before = self.state
        try:
            self.state = act(self.world, before, action)
        except Exception as error:
            raised = error
        self.performed += 1
        try:
            self.job.perform(action)
        except TimeoutError:
            raise
        except Exception as error:
            if type(error) is not type(raised):
                facts = ("raises", f"{type(error).__name__}: {error}", repr(raised))
                self.difference = Difference(self.performed - 1, action, -1, (facts,))
            return Broken(RAISED, f"{type(error).__name__}: {error}")
        if raised is not None:
            facts = ("raises", "nothing", repr(raised))
            self.difference = Difference(self.performed - 1, action, -1, (facts,))
            return None
        self.difference = self._compare(action)
        return self.broken()

    def _compare(self, action: Action | None) -> Difference | None:
        for rank, (real, model) in enumerate(zip(self.job.seen(), self.state.nodes, strict=True)):
            if model.alive and real != model:
                found = tuple(
                    (name, getattr(real, name), getattr(model, name))
                    for name in Node._fields
                    if getattr(real, name) != getattr(model, name)
                )
                return Difference(self.performed - 1, action, rank, found)
        return None

    def broken(self) -> Broken | None:
        """The first promise that what is seen of a rank breaks."""
        for rank, node in enumerate(self.job.seen()):
            broken = broken_by(self.world, node)
            if broken is not None:
                return Broken(broken.promise, f"rank {rank}: {broken.text}")
        return None

    def next_actions(self) -> list[Action]:
        """What can happen next to the real loaders, without faults."""
        state = self.state._replace(nodes=self.job.seen(), faults=0, stops=0)
        return list(actions(self.world, state))

    def broken_at_end(self) -> tuple[Broken | None, Standstill | None]:
        """The same of an end, in which nothing more can happen. Who is said to wait must really
        wait: everybody is let go, and nobody moves."""
        state = self.state._replace(nodes=self.job.seen())
        for name, promise in END_PROMISES:
            text = promise(self.world, state)
            if text is not None and name == "deadlock-freedom":
                standstill = self.job.let_go()
                return (Broken(name, str(standstill)) if standstill.deadlock else None), standstill
            if text is not None:
                return Broken(name, text), None
        return None, None


def follow(world: World, start: State, run: Sequence[Action]) -> Followed:
    """Take the real loader through a run of the shipped protocol."""
    if (world.rules, world.habits) != (SHIPPED, FAITHFUL):
        raise ODBError("follow() is for the shipped protocol")
    with _quiet(), StagedJob(world) as job:
        follower = Follower(world, start, job)
        for number, action in enumerate(run):
            if follower.difference is not None:
                break
            broken = follower.perform(action)
            if follower.difference is not None:
                return Followed(number + 1, follower.difference, broken)
            if broken is not None:
                return Followed(number + 1, broken=broken)
        broken = None if follower.next_actions() else follower.broken_at_end()[0]
        return Followed(follower.performed, follower.difference, broken=broken)


@dataclass(frozen=True)
class RealFall:
    """What became of a variant in the real loader, on the run by which it falls in the model.

    promise, text: what the real loader broke, None if nothing. performed: actions, those of a
    circle each time. difference: where it did not do what the model does. standstill: for a
    deadlock, who waits where. outward: what a user of each rank sees, in a run that goes on like
    this to its end.
    """

    name: str
    expected: str
    promise: str | None
    text: str
    performed: int
    difference: Difference | None
    standstill: Standstill | None
    outward: tuple[str, ...]
    seconds: float

    @property
    def as_expected(self) -> bool:
        """Whether the promise fell that falls in the model: by the same run, or where it is known
        that the real loader parts from it (see `odb.verification.differences`), by another."""
        exactly = self.difference is None or self.name in PARTING_VARIANTS
        return self.promise == self.expected and exactly


def replay_fall(result: MutantResult) -> RealFall:
    """Take the real loader, with a variant plugged in, through the run by which that fell."""
    fall = result.fall
    if fall is None:
        raise ODBError(f"{result.name} has not fallen in the model")
    began = time.perf_counter()
    violation = fall.violation
    start = fall.system.state(violation.states[0])
    standstill = None
    with _quiet(), protocol(result.variant), StagedJob(fall.system.world) as job:
        follower = Follower(fall.system.world, start, job)
        broken = _perform(follower, violation.actions)
        if broken is None and follower.difference is not None:
            _go_on(follower)
            broken, standstill = follower.broken_at_end()
        elif broken is None:
            if violation.repeats is None:
                broken, standstill = follower.broken_at_end()
            else:
                broken = _go_round(follower, violation.actions[violation.repeats :])
        if standstill is None and violation.repeats is None:
            # A driver that ends with an error of its own leaves the others where they are.
            with suppress(Exception):
                _go_on(follower)
        visible = outward(job)
    return RealFall(
        name=result.name,
        expected=violation.promise,
        promise=None if broken is None else broken.promise,
        text="" if broken is None else broken.text,
        performed=follower.performed,
        difference=follower.difference,
        standstill=standstill,
        outward=visible,
        seconds=time.perf_counter() - began,
    )


def _perform(follower: Follower, run: Sequence[Action]) -> Broken | None:
    for action in run:
        broken = follower.perform(action)
        if broken is not None or follower.difference is not None:
            return broken
    return None


def _go_on(follower: Follower) -> None:
    """Go on with the real loader alone, to the end of the epoch: whatever can happen, but no more
    samples."""
    limit = follower.performed + longest_run(follower.world)
    while follower.performed <= limit:
        following = (a for a in follower.next_actions() if not isinstance(a, Deliver | NextEpoch))
        action = next(following, None)
        if action is None:
            return
        follower.performed += 1
        follower.job.perform(action)


def _go_round(follower: Follower, circle: Sequence[Action]) -> Broken | None:
    """Go round a circle until this is longer than any run may be."""
    limit = longest_run(follower.world)
    while follower.performed <= limit:
        broken = _perform(follower, circle)
        if broken is not None or follower.difference is not None:
            return broken
    return Broken("bounded-termination", f"{follower.performed} actions, and no end")


def replay_falls(
    results: Sequence[MutantResult], progress: Callable[[str], None] | None = None
) -> list[RealFall]:
    """The same for all variants that have fallen. `progress(name)` is called before each."""
    found = []
    for result in results:
        if result.fall is not None:
            if progress is not None:
                progress(result.name)
            found.append(replay_fall(result))
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """The loader logs what goes wrong, which here is meant to."""
    logger = logging.getLogger("odb")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
