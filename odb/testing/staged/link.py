"""An exchange in memory, which is complete when the schedule says so."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from odb.errors import EnvelopeError
from odb.sharding import Seat
from odb.testing.staged.stage import Actor, Call, Stage
from odb.transport import LinkLost
from odb.watch.activity import Activity
from odb.watch.verdict import LostRank, Verdict


class StagedLink:
    """One rank's end (see `odb.transport.Transport`)."""

    def __init__(self, stage: Stage, seat: Seat) -> None:
        self.seat = seat
        self.activity = Activity()
        self._stage = stage
        self._lost: LostRank | None = None
        self._listener: Callable[[Verdict], None] | None = None

    def maximum(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._meet("maximum", tuple(values)))

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._meet("total", tuple(values)))

    def broadcast(self, value: Any, source: int) -> Any:
        content = pickle.dumps(value) if self.seat.rank == source else None
        return pickle.loads(self._meet("broadcast", content))

    def _meet(self, name: str, value: Any) -> Any:
        self.check()
        actor: Actor = self._stage.acting.actor
        result = actor.wait_in(Call(name, value), lambda: self._lost is not None)
        self.check()
        return result

    def check(self) -> None:
        if self._lost is not None:
            raise LinkLost(self._lost.rank, self._lost.reason)

    def listen(self, listener: Callable[[Verdict], None]) -> None:
        self._listener = listener

    def lose(self, rank: int) -> None:
        """Notice that the process of a rank is gone, as the watch does: the loader is told, and
        every exchange raises from now on."""
        with self._stage.changed:
            self._lost = LostRank(rank, "its process has ended")
        if self._listener is not None:
            self._listener(self._lost)

    def say_bye(self) -> None:
        pass

    def close(self) -> None:
        pass


def complete(calls: Sequence[Call]) -> None:
    """Complete the exchange that all ranks are in. Raises EnvelopeError if they do not fit
    together: over a real network that is an error, or a wrong sum."""
    names = {call.name for call in calls}
    if len(names) > 1:
        raise EnvelopeError(f"ranks are in different exchanges: {sorted(names)}")
    result = _result(names.pop(), [call.value for call in calls])
    for call in calls:
        call.result = result
        call.complete = True


def _result(name: str, values: Sequence[Any]) -> Any:
    if name == "broadcast":
        return next(value for value in values if value is not None)
    lengths = {len(value) for value in values}
    if len(lengths) > 1:
        raise EnvelopeError(f"ranks post vectors of different lengths: {sorted(lengths)}")
    merge = max if name == "maximum" else _add
    return tuple(reduce(merge, column) for column in zip(*values, strict=True))


def _add(a: int, b: int) -> int:
    return a + b
