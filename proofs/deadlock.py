"""Nobody waits for something that nobody will do: the wait-for argument, for any number of ranks.

Two ranks stand for all: the slowest (its trainer has taken the fewest steps) and any other. What
they can do by themselves is asked of `spec.enabled`, which the explorer asks, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from model_check.abstract import some_samples
from model_check.prover import OUTSIDE, Obligation, Source, both, implies
from proofs.machine import choose
from proofs.theorem import Theorem
from spec.config import Budget, Config, Place
from spec.enabled import Ambient, local_actions
from spec.messages import Emit, Finished, PostCounts, PostReport, Pull, Step, Tallied
from spec.rank import Phase, RankState
from spec.samples import NOTHING
from spec.world import FAITHFUL, Action, Activity, Faults, Habits, Node, Outbox


@dataclass(frozen=True)
class Waiting:
    """What the loader does around the protocol, and whether an exchange and a gradient complete for
    all ranks at once."""

    habits: Habits = FAITHFUL
    exchanges: bool = True
    gradients: bool = True


SHIPPED = Waiting()
PHASES = (Phase.FILLING, Phase.REPORTING, Phase.TOTALLING, Phase.EMITTING, Phase.ENDED)
TRAINERS = (Activity.READY, Activity.IN_GRADIENT, Activity.DONE)
JOINING = Config(Budget(8))
NOTHING_SPECIAL = Ambient(
    may_fail=False,
    may_stop=False,
    stop_after=-1,  # no trainer stops
    someone_died=False,
    someone_left=False,
    epoch_over=0,
)


class _Rank:
    """A rank that may wait: where its batcher and its trainer are.

    decided: steps decided on whose block is complete. taken: those that its trainer has taken;
    queued: those in its queue.
    seen: how many exchanges it has seen the result of.
    """

    def __init__(self, source: Source, name: str) -> None:
        def number(what: str, high: int | None = None) -> Any:
            value = source.int(f"{what} of {name}")
            source.assume(value >= 0 if high is None else both(value >= 0, value <= high))
            return value

        self.decided, self.taken, self.queued = map(number, ("decided", "taken", "queued"))
        self.seen = number("results seen")
        self._phase, self._trainer = number("phase", 4), number("trainer", 2)
        self._inbox = number("result there", 1)

    def settle(self) -> None:
        """Choose what is not a number."""
        self.phase = choose(self._phase, PHASES)
        self.trainer = choose(self._trainer, TRAINERS)
        exchanging = self.phase in (Phase.REPORTING, Phase.TOTALLING)
        self.inbox = exchanging and bool(self._inbox == 1)
        self.waits = exchanging and not self.inbox

    def possible(self) -> Any:
        """What is known of a single rank: steps of complete blocks are emitted in order, all before
        the next exchange (identity-coverage); a trainer is done only behind the last."""
        emitted = self.taken + self.queued
        open_steps = self.decided >= emitted + 1 if self.phase is Phase.EMITTING else True
        all_out = True if self.phase is Phase.EMITTING else self.decided == emitted
        through = self.trainer is not Activity.DONE or self.phase is Phase.ENDED
        left = self.queued == 0 if self.trainer is Activity.DONE else True
        began = self.taken >= 1 if self.trainer is Activity.IN_GRADIENT else True
        return both(open_steps, all_out, through, left, began)

    def node(self) -> Node:
        """The same as a node of the closed system."""
        step = Step(0, 0, (), NOTHING, NOTHING)
        tally: Any = None
        command: Any = {
            Phase.FILLING: Pull(1),
            Phase.REPORTING: PostReport(tally),
            Phase.TOTALLING: PostCounts(()),
            Phase.EMITTING: Emit(step),
        }.get(self.phase)
        ended = self.phase is Phase.ENDED
        return Node(
            RankState(self.phase, Place(0, 0, self.decided)),
            () if ended else (command,),
            left=0,
            inbox=Tallied(tally) if self.inbox else None,
            queue=some_samples(self.queued),  # steps, of which only the number matters
            outbox=Outbox.FINISHED if ended else Outbox.OPEN,
            outcome=Finished() if ended else None,
            trainer=self.trainer,
            steps=self.taken,
        )


class _Pair:
    """The slowest rank and any other, in a state that can be reached."""

    def __init__(self, source: Source) -> None:
        self.slowest, self.other = _Rank(source, "the slowest"), _Rank(source, "another")
        self.capacity = source.int("capacity")
        source.assume(self.capacity >= 1)
        source.assume(self.slowest.taken <= self.other.taken)

    def possible(self, f: Waiting) -> bool:
        """Whether it can be reached, as far as other theorems say."""
        a, b = self.slowest, self.other
        a.settle()
        b.settle()
        return bool(
            both(
                a.possible(),
                b.possible(),
                *(self._agree(x, y) for x, y in ((a, b), (b, a))),
                *(self._gradient(x, y) for x, y in ((a, b), (b, a)) if f.gradients),
                *(self._completes(x, y) for x, y in ((a, b), (b, a)) if f.exchanges),
            )
        )

    def _agree(self, x: _Rank, y: _Rank) -> Any:
        """Ranks that have seen as many results have decided alike (step-alignment): on as many
        steps, and so blocks, and on whether the epoch is over; behind that there is no result."""
        over = x.phase is not Phase.ENDED or y.phase is Phase.ENDED
        last = x.phase is not Phase.ENDED or y.seen <= x.seen
        return both(implies(x.seen <= y.seen, both(x.decided <= y.decided, over)), last)

    def _gradient(self, x: _Rank, y: _Rank) -> Any:
        """A gradient completes for all at once: while x is in one, nobody is behind it yet."""
        if x.trainer is not Activity.IN_GRADIENT:
            return True
        together = y.trainer is Activity.IN_GRADIENT
        return both(y.taken <= x.taken, together or y.taken < x.taken)

    def _completes(self, x: _Rank, y: _Rank) -> Any:
        """An exchange completes for all at once: while x waits for a result, nobody has seen it."""
        return y.seen <= x.seen if x.waits else True

    def actions(self, rank: _Rank, f: Waiting) -> list[Action]:
        """What a rank can do by itself, by the closed system's own rules."""
        world: Any = SimpleNamespace(
            kinds=((1, 1),),
            queue=self.capacity,
            faults=Faults(),
            habits=f.habits,
            coupled=True,
            config=JOINING,
            epochs=1,
        )
        return list(local_actions(world, NOTHING_SPECIAL, 0, rank.node()))


def _all_in_the_gradient(source: Source, f: Waiting) -> Callable[[], Any]:
    pair = _Pair(source)

    def claim() -> Any:
        if not pair.possible(f) or pair.slowest.trainer is not Activity.IN_GRADIENT:
            return OUTSIDE
        other = pair.other
        return both(other.trainer is Activity.IN_GRADIENT, other.taken == pair.slowest.taken)

    return claim


def _waits_with_nothing_left(source: Source, f: Waiting) -> Callable[[], Any]:
    pair = _Pair(source)

    def claim() -> Any:
        if not pair.possible(f) or pair.slowest.trainer is Activity.IN_GRADIENT:
            return OUTSIDE
        if pair.actions(pair.slowest, f):
            return OUTSIDE
        rank = pair.slowest
        waiting = both(rank.waits, rank.decided == rank.taken)
        return waiting if rank.waits else rank.trainer is Activity.DONE

    return claim


def _other_waits_with_it(source: Source, f: Waiting) -> Callable[[], Any]:
    pair = _Pair(source)

    def claim() -> Any:
        if not pair.possible(f) or pair.slowest.trainer is Activity.IN_GRADIENT:
            return OUTSIDE
        if pair.actions(pair.slowest, f) or pair.actions(pair.other, f):
            return OUTSIDE
        slow, other = pair.slowest, pair.other
        if slow.waits:
            return both(other.waits, other.seen == slow.seen)
        return both(other.trainer is Activity.DONE, other.phase is Phase.ENDED)

    return claim


def _never_room(node: Node, capacity: int) -> bool:
    return False


NO_ROOM = replace(SHIPPED, habits=Habits(has_room=_never_room))

THEOREM = Theorem(
    promise="deadlock-freedom",
    states=(
        "In an epoch without faults or early stops, of any number of ranks with queues of any "
        "capacity from 1, there is always somebody who can act, until all are through."
    ),
    assumes=(
        "After every event a rank asks for one thing, after a decision all post the same "
        "collectives, and who has to idle has a sample for it (identity-coverage, "
        "target-envelope); they decide alike (step-alignment). Inputs answer; an "
        "exchange and a gradient complete once all are in them, for all ranks. Trainers meet in a "
        "gradient in every step."
    ),
    reasoning=(
        "Take the rank whose trainer has taken the fewest steps. If it is in a gradient, all are "
        "in the same one, and it completes. If not, and it can do nothing by itself, its queue is "
        "empty and it waits in an exchange with all its steps taken. Any other rank that can do "
        "nothing waits there, too: were its batcher held up by a full queue, it would have been "
        "decided on steps behind those of the slowest, so it would have seen a result that the "
        "slowest waits for, which completes for all at once. So all are in the same exchange, "
        "after as many results, and as all post alike it is the same one: it completes. Or the "
        "slowest is through, and then so is any other that can do nothing."
    ),
    leaves_out=(
        "Faults, early stops, idle stop and further epochs: there the queue and the trainer have "
        "more to do, which is explored by `odb verify`, not proved."
    ),
    obligations=(
        Obligation(
            "gradient",
            "if the slowest trainer is in a gradient, every other one is in it",
            _all_in_the_gradient,
            SHIPPED,
            {"a gradient completes for some": replace(SHIPPED, gradients=False)},
        ),
        Obligation(
            "the slowest",
            "if it can do nothing, it waits in an exchange, all steps taken, or it is through",
            _waits_with_nothing_left,
            SHIPPED,
            {"a queue that never has room": NO_ROOM},
        ),
        Obligation(
            "any other",
            "if it can do nothing either, it waits in the same exchange, or is through as well",
            _other_waits_with_it,
            SHIPPED,
            {
                "a queue that never has room": NO_ROOM,
                "an exchange completes for some": replace(SHIPPED, exchanges=False),
            },
        ),
    ),
)
