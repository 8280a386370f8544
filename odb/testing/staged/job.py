"""A job of staged ranks, which does what the actions of `spec.world` say."""

from __future__ import annotations

from types import TracebackType

from odb.parts import parts
from odb.sharding import Seat
from odb.testing.staged.link import complete
from odb.testing.staged.rank import Answer, StagedRank
from odb.testing.staged.seen import seen
from odb.testing.staged.stage import PATIENCE_S, NotReachedError, Stage, Standing
from odb.testing.staged.standstill import Standstill, let_go
from spec.world import (
    Action,
    Activity,
    BreakGradient,
    Crash,
    Deliver,
    EndInput,
    Exchange,
    FailBatch,
    FailInput,
    Gradient,
    HearOfFailure,
    LosePeer,
    NextEpoch,
    Node,
    NoticeStop,
    PutStep,
    Receive,
    SeeEnd,
    StopEarly,
    TakeStep,
    World,
)


class StagedJob:
    """Real loaders for a world's ranks, in their first epoch. They are built of the parts that hold
    in this thread now (see `odb.testing.variants.protocol`). Use it in a `with` statement, or call
    `close`: it ends the threads of all ranks.
    """

    def __init__(self, world: World, patience: float = PATIENCE_S) -> None:
        self.world = world
        self._stage = Stage(patience)
        chosen = parts()
        self.ranks = [
            StagedRank(self._stage, world, Seat(rank, world.world_size), chosen)
            for rank in range(world.world_size)
        ]
        for rank in self.ranks:
            self._begin(rank)

    def __enter__(self) -> StagedJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks, wherever they are."""
        for rank in self.ranks:
            rank.close()

    def seen(self) -> tuple[Node, ...]:
        """What can be seen of all ranks, in the words of the closed system."""
        return tuple(seen(self.world, rank) for rank in self.ranks)

    def let_go(self, seconds: float = 0.25) -> Standstill:
        """Hold nobody back any more, and see whether anybody moves (see `Standstill`)."""
        return let_go(self._stage, self.world, self.ranks, seconds)

    # ------------------------------------------------------------ actions

    def perform(self, action: Action) -> None:
        """Have the action happen, and wait until all ranks stand still again. Raises what ends a
        driver that is no event of the protocol, EnvelopeError for an exchange that cannot be, and
        NotReachedError if a rank cannot do what the action says."""
        if isinstance(action, Exchange):
            self._exchange()
            return
        if isinstance(action, Gradient):
            for rank in self.ranks:
                if rank.taken.activity is Activity.IN_GRADIENT:
                    rank.taken.activity = Activity.READY
            return
        rank = self.ranks[action.rank]
        match action:
            case Deliver(_, cost, weight):
                rank.script.deliver(cost, weight)
                self._drive(rank)
            case EndInput():
                rank.script.end()
                self._drive(rank)
            case FailInput():
                rank.script.fail()
                self._drive(rank)
            case FailBatch():
                rank.collate.failing = True
                self._drive(rank)
            case PutStep() | NoticeStop():
                self._drive(rank)
            case Receive():
                rank.actor.receive()
                self._settle(rank)
            case LosePeer():
                rank.link.lose(next(r.seat.rank for r in self.ranks if not r.alive))
                rank.actor.disturb()
                self._settle(rank)
            case Crash():
                rank.alive = False
                rank.kill()
            case _:
                self._train(rank, action)

    def _train(self, rank: StagedRank, action: Action) -> None:
        match action:
            case TakeStep():
                answer = rank.await_("its next step", rank.next())
                if answer.error is not None:
                    raise answer.error
                rank.taken.steps.append(answer.value[1])
                coupled = self.world.coupled
                rank.taken.activity = Activity.IN_GRADIENT if coupled else Activity.READY
            case SeeEnd():
                self._see_end(rank)
            case BreakGradient():
                self._leave(rank, Activity.FAILED)
            case StopEarly():
                self._leave(rank, Activity.STOPPED)
            case NextEpoch():
                self._begin(rank)
            case HearOfFailure():
                rank.asked_again = rank.content
                answer = rank.await_("the end of its epoch", rank.begin())
                if answer.error is None:
                    raise NotReachedError(f"rank {rank.seat.rank} begins its next epoch")
                rank.taken.activity, rank.taken.error = Activity.FAILED, answer.error
            case _:
                raise AssertionError(f"{action} is not an action of one rank")

    def _begin(self, rank: StagedRank) -> None:
        answer: Answer = rank.await_("the end of its epoch", rank.begin())
        if answer.error is not None:
            raise answer.error
        self._settle(rank)

    def _see_end(self, rank: StagedRank) -> None:
        answer = rank.await_("the end of its epoch", rank.next())
        if answer.error is None:
            raise NotReachedError(f"rank {rank.seat.rank} is given step {answer.value[1].step}")
        if isinstance(answer.error, StopIteration):
            rank.taken.activity = Activity.DONE
        else:
            rank.taken.activity, rank.taken.error = Activity.FAILED, answer.error

    def _leave(self, rank: StagedRank, activity: Activity) -> None:
        rank.await_("leaving its queue", rank.leave())
        rank.taken.activity = activity

    def _drive(self, rank: StagedRank) -> None:
        rank.actor.go_on()
        self._settle(rank)

    def _exchange(self) -> None:
        calls = [rank.actor.call for rank in self.ranks]
        there = [call for call in calls if call is not None and not call.complete]
        if len(there) < len(self.ranks):
            places = [rank.actor.standing.value for rank in self.ranks]
            raise NotReachedError(f"not all drivers are in an exchange: {places}")
        complete(there)
        for rank in self.ranks:
            # Nobody looks at what a broadcast has brought but the rank itself, at once.
            if there[0].name == "broadcast":
                rank.actor.receive()
        for rank in self.ranks:
            self._settle(rank)

    def _settle(self, rank: StagedRank) -> None:
        rank.settle()
        if rank.actor.standing is Standing.CRASHED:
            assert rank.actor.error is not None
            raise rank.actor.error
