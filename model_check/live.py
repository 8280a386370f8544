"""One run of the closed system, action by action, judged as it goes.

What may happen next is asked of `spec.enabled` and done by `spec.system`, but only of the ranks
whose answer may have changed, so that an action costs about the same with 64 ranks as with two.
"""

from __future__ import annotations

from model_check.end_promises import END_PROMISES
from model_check.explorer import Broken
from model_check.goals import GOALS
from model_check.node_promises import broken_by
from spec.enabled import actions, ambient_of, local_actions, meetings, waits_for_exchange
from spec.system import FAULTS, act
from spec.world import (
    Action,
    Activity,
    Exchange,
    Gradient,
    Node,
    State,
    StopEarly,
    World,
)

RAISED = "step-alignment"
"""The promise that falls if a function of the protocol raises."""

THROUGH = (Activity.DONE, Activity.STOPPED, Activity.FAILED)


def longest_run(world: World) -> int:
    """More actions than any run may have. In an epoch a rank reads each sample and the end; in each
    of at most samples + 1 rounds it receives two results; it puts and takes each of at most
    `samples` steps; and a few actions end it. A round has at most three exchanges, a step one
    gradient."""
    of_a_rank = (world.samples + 1) + 2 * (world.samples + 1) + 2 * world.samples + 8
    of_all = 3 * (world.samples + 1) + world.samples + 2
    return world.epochs * (world.world_size * of_a_rank + of_all)


class Live:
    """A run in progress. `performed`: what has happened. `broken`: the first promise that fell.
    `goals`: those reached. `history`: all states so far, if it is to be kept."""

    def __init__(self, world: World, start: State, keep_history: bool = False) -> None:
        self.world = world
        self.state = start
        self.performed: list[Action] = []
        self.broken: Broken | None = None
        self.goals: set[str] = set()
        self.history: list[State] | None = [start] if keep_history else None
        self._limit = longest_run(world)
        self._ambient = ambient_of(start)
        self._usual: list[tuple[Action, ...]] = [()] * world.world_size
        self._mishaps: list[tuple[Action, ...]] = [()] * world.world_size
        self._meetings: tuple[Action, ...] = ()
        self._dirty = set(range(world.world_size))
        self._busy: list[int] = []
        self._seat: dict[int, int] = {}
        self._refresh()
        for node in start.nodes:
            self._judge(node)

    # ------------------------------------------------------------ what can happen

    @property
    def ready(self) -> list[int]:
        """The ranks that can act without anything going wrong, in no particular order (but the
        same in every run)."""
        return self._busy

    def usual(self, rank: int) -> tuple[Action, ...]:
        """What a rank can do without anything going wrong."""
        return self._usual[rank]

    def mishaps(self, rank: int) -> tuple[Action, ...]:
        """What may go wrong on a rank: faults, and a trainer that stops when it likes."""
        return self._mishaps[rank]

    def meetings(self) -> tuple[Action, ...]:
        """The collectives that can complete."""
        return self._meetings

    def enabled(self, action: Action) -> bool:
        """Whether an action can happen now."""
        if isinstance(action, Exchange | Gradient):
            return action in self._meetings
        return action in self._usual[action.rank] or action in self._mishaps[action.rank]

    # ------------------------------------------------------------ what happens

    def perform(self, action: Action) -> None:
        """Perform an enabled action, and judge the ranks that it changes."""
        before = self.state
        self.performed.append(action)
        try:
            self.state = act(self.world, before, action)
        except Exception as error:
            self.broken = Broken(RAISED, f"{type(error).__name__}: {error}")
            return
        if self.history is not None:
            self.history.append(self.state)
        if isinstance(action, Exchange | Gradient):
            changed = range(self.world.world_size)
        else:
            changed = range(action.rank, action.rank + 1)
        self._dirty.update(changed)
        rarer = (before.faults, before.stops) != (self.state.faults, self.state.stops)
        if rarer or any(_seen(before.nodes[r]) != _seen(self.state.nodes[r]) for r in changed):
            self._look_around()
        self._refresh()
        for rank in changed:
            if self.broken is None and before.nodes[rank] is not self.state.nodes[rank]:
                self._judge(self.state.nodes[rank], rank)
        if self.broken is None and len(self.performed) > self._limit:
            self.broken = Broken("bounded-termination", f"over {self._limit} actions, and no end")

    def conclude(self) -> None:
        """Judge the end of a run in which nothing more happens: what may still go wrong does not,
        as in a world with fewer faults."""
        end = self.state._replace(faults=0, stops=0)
        left = next(actions(self.world, end), None)
        if left is not None:
            raise AssertionError(f"{left} can still happen")
        for name, promise in END_PROMISES:
            text = promise(self.world, end)
            if text is not None:
                self.broken = Broken(name, text)
                return

    def _judge(self, node: Node, rank: int = 0) -> None:
        broken = broken_by(self.world, node)
        if broken is not None:
            self.broken = Broken(broken.promise, f"rank {rank}: {broken.text}")
        for name, reached in GOALS.items():
            if name not in self.goals and reached(self.world, node):
                self.goals.add(name)

    # ------------------------------------------------------------ keeping up

    def _look_around(self) -> None:
        """Something happened that other ranks may see."""
        ambient = ambient_of(self.state)
        if ambient != self._ambient:
            self._ambient = ambient
            self._dirty.update(range(self.world.world_size))

    def _refresh(self) -> None:
        for rank in sorted(self._dirty):
            usual: list[Action] = []
            mishaps: list[Action] = []
            for action in local_actions(self.world, self._ambient, rank, self.state.nodes[rank]):
                (mishaps if self._is_mishap(action) else usual).append(action)
            self._usual[rank], self._mishaps[rank] = tuple(usual), tuple(mishaps)
            self._seat_rank(rank, bool(usual))
        self._dirty.clear()
        # Whether a collective can complete is for `spec.enabled` to say. It need not be asked
        # while some rank is in neither.
        self._meetings = ()
        if all(map(waits_for_exchange, self.state.nodes)) or all(map(_joined, self.state.nodes)):
            self._meetings = tuple(meetings(self.world, self.state.nodes))

    def _is_mishap(self, action: Action) -> bool:
        if isinstance(action, StopEarly):
            return self.state.stop_after is None
        return isinstance(action, FAULTS)

    def _seat_rank(self, rank: int, ready: bool) -> None:
        """Keep the list of ready ranks, at a cost that does not grow with it."""
        if ready and rank not in self._seat:
            self._seat[rank] = len(self._busy)
            self._busy.append(rank)
        elif not ready and rank in self._seat:
            seat, last = self._seat.pop(rank), self._busy.pop()
            if last != rank:
                self._busy[seat] = last
                self._seat[last] = seat


def _joined(node: Node) -> bool:
    """Whether a trainer does not stand in the way of a gradient (`spec.enabled` knows better)."""
    return node.trainer in (Activity.IN_GRADIENT, Activity.DONE)


def _seen(node: Node) -> tuple[bool, bool, bool, int]:
    """What other ranks can see of a rank (see `spec.enabled.Ambient`)."""
    return node.alive, node.surrendered, node.trainer in THROUGH, node.machine.place.epoch
