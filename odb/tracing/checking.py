"""Checks traces: replays every rank, compares the exchanges, judges the promises, and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from model_check.render import words
from odb.tracing import wording
from odb.tracing.exchanges import Placed, compare
from odb.tracing.facts import RankFacts, facts_of
from odb.tracing.judging import judge, run_of
from odb.tracing.reading import EpochTraces, RankTrace, epoch_folders, read_epoch
from odb.tracing.replay import replay
from odb.tracing.report import EpochReport, Report

Progress = Callable[[int, int, str], None]


def _silent(done: int, of: int, what: str) -> None:
    pass


def check_folder(folder: Path, epoch: int | None = None, progress: Progress = _silent) -> Report:
    """Check all epochs of a folder, or one. `progress(done, of, what)` is called for each epoch and
    rank. Raises TraceError for files that are no traces."""
    folders = epoch_folders(folder, epoch)
    reports = []
    for done, path in enumerate(folders):
        progress(done, len(folders), f"reading {path.name}")
        tell = partial(progress, done, len(folders))
        reports.append(check_epoch(read_epoch(path), tell))
    progress(len(folders), len(folders), "done")
    return Report(folder, tuple(reports))


def check_epoch(
    traces: EpochTraces, tell: Callable[[str], None] = lambda what: None
) -> EpochReport:
    """Check one epoch."""
    facts: dict[int, RankFacts] = {}
    found: list[Placed] = []
    transitions = 0
    for rank, trace in sorted(traces.ranks.items()):
        tell(f"replaying {traces.folder.name}, rank {rank}")
        replayed = replay(trace)
        transitions += replayed.transitions
        facts[rank] = facts_of(trace)
        if replayed.divergence is not None:
            found.append(Placed(replayed.exchanges, 0, replayed.divergence))
    found += compare(facts, traces.world_size)
    found.sort(key=lambda placed: placed[:2])
    run = run_of(traces, facts)
    records = [of_rank.record for of_rank in facts.values()]
    return EpochReport(
        folder=traces.folder,
        epoch=traces.epoch,
        world_size=traces.world_size,
        rounds=max(of_rank.rounds for of_rank in facts.values()),
        steps=max(len(record.steps) for record in records),
        samples=sum(len(step.group) for record in records for step in record.steps),
        outcome=_outcome(facts),
        transitions=transitions,
        divergences=tuple(placed.divergence for placed in found),
        promises=judge(run),
        missing=tuple(_missing(traces)),
        notes=tuple(_notes(traces, run.divided)),
    )


def _outcome(facts: Mapping[int, RankFacts]) -> str:
    outcomes: dict[str, list[int]] = {}
    for rank, of_rank in facts.items():
        outcome = of_rank.record.outcome
        text = "no end" if outcome is None else words.outcome(outcome)
        outcomes.setdefault(text, []).append(rank)
    if len(outcomes) == 1:
        return next(iter(outcomes))
    return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in outcomes.items())


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + words.listed(map(str, ranks))


def _missing(traces: EpochTraces) -> Iterator[str]:
    """What there should be and is not."""
    for rank in range(traces.world_size):
        if rank in traces.empty:
            yield f"rank {rank}: its file holds no whole line"
        elif rank not in traces.ranks:
            yield f"rank {rank}: there is no file"
        elif traces.ranks[rank].end is None and traces.ranks[rank].crash is None:
            yield f"rank {rank}: {_breaks_off(traces.ranks[rank])}"


def _breaks_off(trace: RankTrace) -> str:
    """Where a trace without an end stops, and what the rank was about to do."""
    cut = " (in the middle of a line)" if trace.torn else ""
    if not trace.lines:
        return f"its trace breaks off behind its first line{cut}"
    last = trace.lines[-1]
    doing = wording.command(last.commands[-1]) if last.commands else "nothing"
    return (
        f"its trace breaks off behind line {last.number}{cut}, {last.time:.3f} s into the epoch, "
        f"where the rank {doing}: its process was killed, or could not write any more"
    )


def _notes(traces: EpochTraces, divided: bool) -> Iterator[str]:
    for rank, trace in traces.ranks.items():
        for rule, name in trace.header.rules.items():
            yield f"rank {rank} ran with another rule than the shipped one: {rule} is {name}"
    if not divided:
        yield "a sampler chose the samples, so that their names need not differ between ranks"
