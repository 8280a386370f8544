"""Records runs for tests of the traces: ranks as threads, exchange and samples in memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odb.interpreter import Interpreter
from odb.sharding import Seat
from odb.tracing.recorder import Recorder, TraceFolder
from odb.transport import LinkBroken, LoopBack
from spec.config import Config
from spec.messages import Outcome, Step
from spec.rank import RankState, Rules, Setup
from spec.samples import Sample

Lines = list[dict[str, Any]]


class Meeting:
    """Where threads exchange. `most`: after so many exchanges the link breaks. `add`: what is added
    to every total, as a broken transport might."""

    def __init__(self, world_size: int, most: int | None = None, add: int = 0) -> None:
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.slots: list[Any] = [None] * world_size
        self.left = most
        self.add = add

    def all(self, rank: int, value: Any) -> list[Any]:
        if self.left == 0:
            raise LinkBroken("the test has cut it")
        self.slots[rank] = value
        try:
            if self.barrier.wait() == 0 and self.left is not None:
                self.left -= 1
            everything = list(self.slots)
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise LinkBroken("a rank is gone") from error
        return everything


class Link(LoopBack):
    """The transport of one thread."""

    def __init__(self, meeting: Meeting, seat: Seat) -> None:
        super().__init__()
        self.meeting = meeting
        self.seat = seat

    def maximum(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(max, *self.meeting.all(self.seat.rank, values), values))

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        columns = zip(*self.meeting.all(self.seat.rank, values), strict=False)
        return tuple(sum(column) + self.meeting.add for column in columns)

    def broadcast(self, value: Any, source: int) -> Any:
        return self.meeting.all(self.seat.rank, value)[source]


@dataclass
class MemoryShell:
    """A rank's samples in memory. Reading fails at sample `fail_at`, making the batch of step
    `fail_batch` does, and the trainer stops after `stop_after` steps."""

    link: Link
    shard: Sequence[Sample]
    chunk: int = 3
    fail_at: int | None = None
    fail_batch: int | None = None
    stop_after: int | None = None
    outcome: Outcome | None = None
    steps: list[Step] = field(default_factory=list)

    def pull(self, first_seq: int, limit: int) -> tuple[Sample, ...] | None:
        if self._stopped():
            return None
        if self.fail_at is not None and first_seq >= self.fail_at:
            raise RuntimeError(f"cannot read sample {first_seq}")
        last = first_seq + min(limit, self.chunk)
        return tuple(self.shard[first_seq : min(last, self.fail_at or last)])

    def emit(self, step: Step) -> bool:
        if step.number == self.fail_batch and not step.idle:
            raise RuntimeError(f"cannot make batch {step.number}")
        if self._stopped():
            return False
        self.steps.append(step)
        return True

    def _stopped(self) -> bool:
        return self.stop_after is not None and len(self.steps) >= self.stop_after

    def share_spare(self, donor: int) -> None:
        self.link.broadcast(None, donor)

    def share_reason(self, rank: int) -> None:
        self.link.broadcast(None, rank)

    def end(self, outcome: Outcome, state: RankState) -> None:
        self.outcome = outcome

    def filter(self, sample: Sample) -> None: ...
    def keep_spare(self, sample: Sample) -> None: ...
    def retire(self) -> None: ...
    def give_up(self, state: RankState) -> None: ...
    def failed(self, error: BaseException) -> None: ...
    def lost(self, error: LinkBroken) -> None: ...


def samples(*costs: int) -> tuple[Sample, ...]:
    """A shard of samples with these costs."""
    return tuple(Sample(seq, cost, cost) for seq, cost in enumerate(costs))


def record_run(
    folder: Path,
    config: Config,
    shards: Sequence[Sequence[Sample]],
    *,
    rules: Rules | None = None,
    meeting: Meeting | None = None,
    epoch: int = 0,
    **of_rank: dict[int, Any],
) -> list[MemoryShell]:
    """Run an epoch and record it. `of_rank`: for each option of the shell, its value by rank."""
    world_size = len(shards)
    meeting = meeting or Meeting(world_size)
    folders = [TraceFolder(folder) for _ in shards]
    shells: list[MemoryShell] = []
    errors: list[BaseException] = []

    def run(rank: int, interpreter: Interpreter) -> None:
        try:
            interpreter.run()
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = []
    for rank, shard in enumerate(shards):
        link = Link(meeting, Seat(rank, world_size))
        options = {name: values[rank] for name, values in of_rank.items() if rank in values}
        shell = MemoryShell(link, shard, **options)
        setup = Setup(config, rank, world_size, rules or Rules())
        file = folders[rank].open(setup, epoch, divided=True)
        # Rank r has the samples r, r + W, ... of the dataset.
        recorder = Recorder(file, lambda seqs, rank=rank: [rank + s * world_size for s in seqs])
        interpreter = Interpreter(setup, epoch, shell, link, recorder)
        shells.append(shell)
        threads.append(threading.Thread(target=run, args=(rank, interpreter), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return shells


def path_of(folder: Path, rank: int, epoch: int = 0) -> Path:
    return folder / f"epoch-{epoch:05}" / f"rank-{rank:05}.jsonl"


def edit(folder: Path, rank: int, change: Callable[[Lines], Lines | None], epoch: int = 0) -> None:
    """Tamper with a trace: `change` gets its lines as plain data, changes or returns them."""
    path = path_of(folder, rank, epoch)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = change(lines)
    lines = lines if changed is None else changed
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def find(lines: Lines, event: str, nth: int = 0) -> int:
    """The index of the nth line with this event."""
    found = [i for i, line in enumerate(lines) if line.get("event", [None])[0] == event]
    return found[nth]
