"""What the user of a staged job sees of an epoch: steps, samples and errors, and nothing inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from odb.testing.staged import StagedJob
from odb.testing.staged.rank import StagedRank
from odb.testing.staged.stage import Standing

HELD = "are held by a driver that has not ended"
WHERE = {
    Standing.ENDED: "are gone without a word",
    Standing.CRASHED: "were held by the driver",
}


def outward(job: StagedJob) -> tuple[str, ...]:
    """A sentence for each rank."""
    return tuple(
        f"rank {rank.seat.rank} {_of(rank) if rank.alive else 'died'}" for rank in job.ranks
    )


def _of(rank: StagedRank) -> str:
    """What a rank's trainer was given, and what became of the samples that were read. Every one
    must have been given, or be listed as filtered or undelivered, or be in a step that the trainer
    left in the queue."""
    assert rank.stats is not None
    infos = rank.taken.steps
    given = Counter(seq for info in infos for seq in _seqs(info.sample_ids))
    listed = {*_seqs(entry.sample_id for entry in rank.stats.filtered)}
    undelivered = {*_seqs(rank.stats.undelivered)}
    put = {sample.seq for step in rank.actor.put for sample in step.group}
    missing = {*range(len(rank.script.read))} - {*given} - listed - undelivered - put
    twice = {seq for seq, times in given.items() if times > 1}
    facts = [f"took steps {[info.step for info in infos]} with samples {sorted(given.elements())}"]
    if missing:
        facts.append(f"samples {sorted(missing)} {WHERE.get(rank.actor.standing, HELD)}")
    facts += [f"samples {sorted(twice)} came twice"] if twice else []
    if undelivered:
        complete = ", in an epoch that calls itself complete" if rank.stats.complete else ""
        facts.append(f"samples {sorted(undelivered)} are listed as undelivered{complete}")
    if rank.crashed is not None:
        facts.append(f"its driver ended with {type(rank.crashed).__name__}: {rank.crashed}")
    if rank.taken.error is not None:
        facts.append(f"its trainer got {type(rank.taken.error).__name__}")
    return "; ".join(facts)


def _seqs(sample_ids: Iterable[Any]) -> list[int]:
    return [position for _, _, position in sample_ids]
