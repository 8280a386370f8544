"""One staged rank: a real loader on a dataset that is written as it is read, and its trainer."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from torch.utils.data import IterableDataset

from odb.info import ODBStepInfo
from odb.loader import ODBDataLoader
from odb.observer import Observer
from odb.outbox import Content, Outbox
from odb.parts import Parts, built_of
from odb.session import StepIterator
from odb.sharding import Seat
from odb.stats import LoaderStats
from odb.testing.faults import InjectedError
from odb.testing.staged.link import StagedLink
from odb.testing.staged.stage import Actor, Stage, Standing
from spec.config import CostRule, Idle, Mode
from spec.rank import Setup
from spec.world import Activity, World


class Script(IterableDataset[Any]):
    """Yields what it is told to, and ends or fails when it is told to. `read`: the (cost, weight)
    of what it has yielded in this epoch."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, int] | None] = deque()
        self._failing = False
        self.read: list[tuple[int, int]] = []

    def begin(self) -> None:
        """Another epoch begins."""
        self._lines.clear()
        self._failing = False
        self.read = []

    def deliver(self, cost: int, weight: int) -> None:
        """Yield this next."""
        self._lines.append((cost, weight))

    def end(self) -> None:
        """Yield no more."""
        self._lines.append(None)

    def fail(self) -> None:
        """Raise next."""
        self._failing = True
        self._lines.append(None)

    def __iter__(self) -> Iterator[Any]:
        while True:
            line = self._lines.popleft()
            if line is None:
                break
            self.read.append(line)
            yield {"cost": line[0], "weight": line[1]}
        if self._failing:
            raise InjectedError("the dataset was told to fail")


class Collate:
    """Makes a list of costs; fails when it is told to."""

    def __init__(self, multiple: int) -> None:
        self.pad_to_multiple_of = multiple
        self.failing = False

    def __call__(self, samples: list[Any]) -> list[int]:
        if self.failing:
            self.failing = False
            raise InjectedError("the collate function was told to fail")
        return [sample["cost"] for sample in samples]


@dataclass
class Answer:
    """What became of something that a trainer was asked to do."""

    done: bool = False
    value: Any = None
    error: BaseException | None = None


@dataclass
class Taken:
    """What a trainer has seen of an epoch. errors: what its loop was ended by."""

    steps: list[ODBStepInfo] = field(default_factory=list)
    activity: Activity = Activity.READY
    error: BaseException | None = None


class StagedRank:
    """A loader for a world's configuration, its driver (`actor`) and its trainer."""

    def __init__(self, stage: Stage, world: World, seat: Seat, parts: Parts) -> None:
        self.seat = seat
        self.alive = True
        self.script = Script()
        self.collate = Collate(world.config.budget.multiple)
        self.link = StagedLink(stage, seat)
        self.actors: list[Actor] = []
        self.epochs: list[Taken] = []
        self._stage = stage
        parts = replace(parts, connect=lambda *_: self.link, watching=self._watching)
        self._parts = parts
        self.loader = _loader(world, self.script, self.collate)
        self._outboxes: list[Outbox[Any]] = []
        self.setup: Setup | None = None
        self.outbox: Outbox[Any] | None = None
        self.stats: LoaderStats | None = None
        self.asked_again: Content | None = None
        self._iterator: StepIterator | None = None
        self._requests: SimpleQueue[tuple[Callable[[], Any], Answer] | None] = SimpleQueue()
        self.thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._train,),
            name=f"rank {seat.rank} trainer",
            daemon=True,
        )
        self.thread.start()

    @property
    def content(self) -> Content:
        """What is in the outbox; of an epoch that the trainer has left for the next one, and then
        heard that it failed, what was in it before."""
        assert self.outbox is not None
        return self.asked_again or self.outbox.look()

    @property
    def threads(self) -> list[threading.Thread | None]:
        """Its trainer's and its driver's."""
        return [self.thread, *(actor.thread for actor in self.actors[-1:])]

    @property
    def actor(self) -> Actor:
        """The driver of the current epoch."""
        return self.actors[-1]

    @property
    def taken(self) -> Taken:
        """What the trainer has seen of the current epoch."""
        return self.epochs[-1]

    def _watching(self, inner: Observer, setup: Setup, outbox: Outbox[Any]) -> Observer:
        self.setup, self.outbox = setup, outbox
        self._outboxes.append(outbox)
        self.actors.append(Actor(self._stage, inner))
        return self.actor

    # ------------------------------------------------------------ the trainer's thread

    def _train(self) -> None:
        with built_of(self._parts):
            while True:
                request = self._requests.get()
                if request is None:
                    return
                act, answer = request
                try:
                    answer.value = act()
                except BaseException as error:
                    answer.error = error
                with self._stage.changed:
                    answer.done = True
                    self._stage.moved()

    def ask(self, act: Callable[[], Any]) -> Answer:
        """Have the trainer do something; does not wait for it."""
        answer = Answer()
        self._requests.put((act, answer))
        return answer

    def await_(self, what: str, answer: Answer) -> Answer:
        """Wait until the trainer has done it."""
        self._stage.wait_for(f"rank {self.seat.rank}: {what}", lambda: answer.done, self.threads)
        return answer

    def begin(self) -> Answer:
        """Have the trainer begin its next epoch."""

        def steps() -> None:
            iterator = self.loader.steps()
            self._iterator, self.stats = iterator, self.loader.stats
            self.epochs.append(Taken())
            self.script.begin()

        return self.ask(steps)

    def next(self) -> Answer:
        """Have the trainer ask for its next step."""
        assert self._iterator is not None
        return self.ask(self._iterator.__next__)

    def leave(self) -> Answer:
        """Have the trainer take no more steps."""
        assert self._iterator is not None
        return self.ask(self._iterator.close)

    # ------------------------------------------------------------ the driver's thread

    def settle(self) -> None:
        """Wait until the driver goes no further by itself."""
        actor, what = self.actor, f"rank {self.seat.rank}: its driver"
        self._stage.wait_for(what, lambda: actor.settled, self.threads)
        if actor.through and actor.thread is not None:
            actor.thread.join(self._stage.patience)

    def kill(self) -> None:
        """End the driver as if the process had died."""
        for actor, outbox in zip(self.actors, self._outboxes, strict=True):
            actor.kill()
            Outbox.close(outbox)  # a changed one may not let go of those that wait in it
        for actor in self.actors:
            if actor.thread is not None:
                actor.thread.join(1)

    def close(self) -> None:
        """End all threads."""
        self.kill()
        self._requests.put(None)
        self.thread.join(1)
        self.loader.close(timeout=0.0)

    @property
    def crashed(self) -> BaseException | None:
        """What ended the driver that is no event of the protocol."""
        return self.actor.error if self.actor.standing is Standing.CRASHED else None


def _loader(world: World, script: Script, collate: Collate) -> ODBDataLoader:
    config, budget = world.config, world.config.budget
    return ODBDataLoader(
        script,
        token_budget=budget.tokens,
        collate_fn=collate,
        window=config.window,
        slow_start=config.slow_start,
        cost_fn=lambda sample: sample["cost"],
        loss_weight_fn=lambda sample: sample["weight"],
        packed=budget.rule is CostRule.SUMMED,
        max_samples=budget.max_samples,
        join=config.mode is Mode.JOIN,
        quota=config.quota,
        accumulation_steps=config.accumulation_steps,
        idle="pad" if config.idle is Idle.PAD else "stop",
        seed=config.seed,
        sharded=True,
        prefetch=world.queue,
        chunk=1,
    )
