"""Performs a recorded run once more in the closed system, so that it can be drawn like a
counterexample.

The traces say what the batchers did. What they leave open is filled in: a trainer takes each step
as soon as it is in the queue, and enters no gradient. Samples that arrived together arrive one by
one, which leads to the same state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from model_check.render.trace import Trace
from odb.errors import ConfigError
from odb.tracing.checking import check_epoch
from odb.tracing.facts import facts_of
from odb.tracing.reading import EpochTraces, Line
from odb.tracing.report import EpochReport
from spec.enabled import COLLECTIVES
from spec.errors import ODBError
from spec.messages import (
    Arrived,
    Closed,
    Emitted,
    Failed,
    InputEnded,
    PeerLost,
    PostCounts,
    PostReport,
    Pull,
    Tallied,
    Totalled,
)
from spec.system import act, fresh
from spec.world import (
    Action,
    Activity,
    Crash,
    Deliver,
    EndInput,
    Exchange,
    FailBatch,
    FailInput,
    Faults,
    LosePeer,
    NoticeStop,
    Outbox,
    PutStep,
    Receive,
    SeeEnd,
    State,
    StopEarly,
    TakeStep,
    World,
)

MOST_KINDS = 8
"""Costs that a heading lists; of more it gives the lowest and the highest."""


def perform(traces: EpochTraces, steps: tuple[int, int] | None, limit: int) -> Trace:
    """The run, or the first `limit` actions of the rounds that take these steps. A run that does
    not conform is performed up to the first line that is not the spec's.

    Raises ConfigError for a run that the closed system cannot perform.
    """
    missing = [rank for rank in range(traces.world_size) if rank not in traces.ranks]
    if missing:
        raise ConfigError(f"rank {missing[0]} has no trace: without it the run cannot be drawn")
    configs = {trace.header.config for trace in traces.ranks.values()}
    config = configs.pop()
    if configs or config.budget.extras:
        raise ConfigError(
            "a run with resources, or with ranks that are configured differently, cannot be drawn: "
            "use the table"
        )
    report = check_epoch(traces)
    performance = _Performance(traces, _world(traces), report)
    performance.run()
    states, actions = performance.states, performance.actions
    first, last = _slice(traces, performance, steps)
    last = min(last, first + limit)
    cut = last < len(actions)
    problem = "" if cut or not report.problems() else report.problems()[0]
    title = f"A recorded run: {traces.folder.name}"
    if first or cut:
        title += f", actions {first + 1} to {last} of {len(actions)}"
    return Trace(
        title=title,
        promise="conformance" if problem else "",
        text=problem,
        world=performance.world,
        states=tuple(states[first : last + 1]),
        actions=tuple(actions[first:last]),
    )


def _world(traces: EpochTraces) -> World:
    arrived = [facts_of(trace).arrived for trace in traces.ranks.values()]
    kinds = sorted({(s.cost, s.weight) for shard in arrived for s in shard})
    if len({cost for cost, _ in kinds}) > MOST_KINDS:
        kinds = [kinds[0], kinds[-1]]
    return World(
        config=next(iter(traces.ranks.values())).header.config,
        world_size=traces.world_size,
        kinds=tuple(kinds),
        samples=max(map(len, arrived)),
        coupled=False,
        faults=Faults(0),
    )


class _Performance:
    """The closed system, driven by the lines of all ranks, each exchange behind all that leads to
    it."""

    def __init__(self, traces: EpochTraces, world: World, report: EpochReport) -> None:
        self.world = world
        ranks = range(traces.world_size)
        nodes = tuple(fresh(world, rank, traces.epoch) for rank in ranks)
        self.states = [State(nodes, faults=0, stops=0)]
        self.actions: list[Action] = []
        self._lines = [deque(traces.ranks[rank].lines[1:]) for rank in ranks]
        self._ended = [traces.ranks[rank].end is not None for rank in ranks]
        self._stop = [
            min((d.line for d in report.divergences if d.rank == rank), default=None)
            for rank in ranks
        ]

    def run(self) -> None:
        """Perform all that can be performed."""
        try:
            while self._local() or self._exchange() or self._crashes():
                pass
            for rank, node in enumerate(self.states[-1].nodes):
                finished = node.outbox is Outbox.FINISHED and not node.queue
                if finished and node.trainer is Activity.READY:
                    self._act(SeeEnd(rank))
        except (ODBError, AssertionError):
            pass  # what the spec does not do is the divergence, and told as such

    def _act(self, action: Action) -> None:
        state = self.states[-1]
        self.states.append(act(self.world, state._replace(faults=1, stops=1), action))
        self.states[-1] = self.states[-1]._replace(faults=0, stops=0)
        self.actions.append(action)

    def _next(self, rank: int) -> Line | None:
        line = self._lines[rank][0] if self._lines[rank] else None
        stop = self._stop[rank]
        return None if line is None or (stop is not None and line.number >= stop) else line

    def _local(self) -> bool:
        """Perform the earliest line in which a rank needs no other."""
        ready = [
            (line.time, rank)
            for rank in range(self.world.world_size)
            if (line := self._next(rank)) is not None
            and not isinstance(line.event, Tallied | Totalled)
        ]
        if not ready:
            return False
        _, rank = min(ready)
        line = self._lines[rank].popleft()
        if isinstance(line.event, PeerLost):
            self._crashes()
        for action in self._actions(rank, line):
            self._act(action)
        return True

    def _actions(self, rank: int, line: Line) -> Iterator[Action]:
        node = self.states[-1].nodes[rank]
        match line.event:
            case Arrived(samples):
                for sample in samples:
                    yield Deliver(rank, sample.cost, sample.weight)
            case InputEnded():
                yield EndInput(rank)
            case Failed():
                reading = bool(node.commands) and isinstance(node.commands[0], Pull)
                yield FailInput(rank) if reading else FailBatch(rank)
            case Closed():
                if node.outbox is not Outbox.CLOSED:
                    yield StopEarly(rank)
                yield NoticeStop(rank)
            case Emitted():
                yield PutStep(rank)
                yield TakeStep(rank)
            case PeerLost():
                yield LosePeer(rank)
            case _:
                pass

    def _exchange(self) -> bool:
        """Complete an exchange that all ranks are in, and give each its result."""
        fronts = [node.commands[0] if node.commands else None for node in self.states[-1].nodes]
        kinds = {type(front) for front in fronts}
        if len(kinds) > 1 or not isinstance(fronts[0], COLLECTIVES):
            return False
        has_result = isinstance(fronts[0], PostReport | PostCounts)
        told = [r for r in range(len(fronts)) if self._next(r) is not None]
        if has_result and not told:
            return False
        self._act(Exchange(type(fronts[0]).__name__))
        for rank in told if has_result else ():
            self._lines[rank].popleft()
            self._act(Receive(rank))
        return True

    def _crashes(self) -> bool:
        """Ranks whose trace breaks off: their processes were killed, as far as one can tell."""
        gone = [
            rank
            for rank, node in enumerate(self.states[-1].nodes)
            if node.alive and not self._lines[rank] and not self._ended[rank]
        ]
        for rank in gone:
            self._act(Crash(rank))
        return bool(gone)


def _slice(
    traces: EpochTraces, performance: _Performance, steps: tuple[int, int] | None
) -> tuple[int, int]:
    """The first action of the rounds of these steps, and the one behind the last."""
    if steps is None:
        return 0, len(performance.actions)
    first, last = steps
    rounds = {
        step.round
        for trace in traces.ranks.values()
        for step in facts_of(trace).record.steps
        if first <= step.number <= last
    }
    inside = [
        i
        for i, (state, action) in enumerate(
            zip(performance.states, performance.actions, strict=False)
        )
        if _round(state, action) in rounds
    ]
    if not inside:
        raise ConfigError(f"the run has no step between {first} and {last}")
    return inside[0], inside[-1] + 1


def _round(state: State, action: Action) -> int:
    machine = state.nodes[getattr(action, "rank", 0)].machine
    return machine.pending[0].round if machine.pending else machine.place.round
