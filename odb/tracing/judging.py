"""The promises over the merged run of all ranks, on what was recorded, whatever the spec says.

The definitions are those by which every epoch of the small scope is judged
(`model_check.promises`); here are the ones that need the names of the dataset's samples, and those
for epochs that end early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from model_check import promises
from model_check.render import words
from odb.info import SampleId
from odb.tracing import wording
from odb.tracing.facts import RankFacts
from odb.tracing.reading import EpochTraces
from odb.tracing.report import Judged, PromiseResult
from spec.config import Config, Mode
from spec.lockstep import EpochRecord, RankRecord
from spec.messages import AbortedBy, Finished, Lost
from spec.samples import NOTHING, Counts, Sample, add_counts, counts_of
from spec.scaling import loss_scale

TOLERANCE = 1e-9
"""Of the sum of loss scales, which are floating-point numbers."""


@dataclass(frozen=True)
class Run:
    """All that is known of an epoch. missing: ranks without a trace."""

    facts: Mapping[int, RankFacts]
    world_size: int
    epoch: promises.Epoch
    divided: bool

    @property
    def config(self) -> Config:
        """The settings of the first rank."""
        return self.epoch.config

    @property
    def missing(self) -> list[int]:
        """Ranks without a trace."""
        return [rank for rank in range(self.world_size) if rank not in self.facts]

    @property
    def finished(self) -> bool:
        """Whether every rank has ended the epoch as its mode says."""
        outcomes = [f.record.outcome for f in self.facts.values()]
        return not self.missing and all(isinstance(outcome, Finished) for outcome in outcomes)


def run_of(traces: EpochTraces, facts: Mapping[int, RankFacts]) -> Run:
    """The merged run. A rank without a trace did nothing that is known."""
    unknown = RankRecord(retired_after=0)
    ranks = range(traces.world_size)
    records = [facts[rank].record if rank in facts else unknown for rank in ranks]
    shards = [facts[rank].arrived if rank in facts else [] for rank in ranks]
    rounds = max(of_rank.rounds for of_rank in facts.values())
    headers = [of_rank.trace.header for of_rank in facts.values()]
    epoch = promises.Epoch(headers[0].config, shards, EpochRecord(records, rounds))
    divided = all(header.divided for header in headers)
    return Run(facts, traces.world_size, epoch, divided)


class Unknown(Exception):
    """A promise cannot be checked, and why."""


class NotAsked(Exception):
    """A promise says nothing about this epoch, and why."""


# ---------------------------------------------------------------- promises of our own


def identity_coverage(run: Run) -> str | None:
    """Every sample that has arrived on a rank leaves it at most once; where odb divides the
    dataset, none of its samples arrives twice, on any rank. In join mode an epoch that finishes has
    emitted or filtered all that arrived."""
    for rank, of_rank in run.facts.items():
        for text in _doubled(of_rank):
            return f"rank {rank}: {text}"
    if run.divided:
        seen: dict[SampleId, str] = {}
        for rank, of_rank in run.facts.items():
            for seq, name in of_rank.ids.items():
                here = f"sample {seq} of rank {rank}"
                if name in seen:
                    return f"{seen[name]} and {here} are both sample {name!r} of the dataset"
                seen[name] = here
    if run.finished:
        return promises.identity_coverage(run.epoch)
    if run.missing:
        raise Unknown("the samples of a rank without a trace are not known")
    return None


def _doubled(of_rank: RankFacts) -> Iterator[str]:
    """Samples of a rank that are in two places, or came from nowhere."""
    there = set(of_rank.arrived)
    found: dict[Sample, str] = {}
    places = [(s, "the list of filtered samples") for s in of_rank.record.filtered]
    places += [(s, f"step {t.number}") for t in of_rank.record.steps for s in t.group]
    for sample, place in places:
        if sample not in there:
            yield f"sample {sample.seq} is in {place}, and has not arrived"
        if sample in found:
            yield f"sample {sample.seq} is in {found[sample]} and in {place}"
        found[sample] = place


def exact_gradient(run: Run) -> str | None:
    """The loss scales of a block add up to the number of ranks, as the totals are the sums of what
    the ranks put into its steps. (Not from the step on before which a rank failed: there it idles
    instead.)"""
    sums: dict[int, Counts] = {}
    present: dict[int, int] = {}
    for rank, of_rank in run.facts.items():
        for step in of_rank.record.steps:
            if step.local != counts_of(step.group):
                said, are = wording.counts(step.local), wording.counts(counts_of(step.group))
                return f"rank {rank} counts {said} in step {step.number}; its samples come to {are}"
            if step.total.weight <= 0:
                return f"step {step.number} has no loss weight on any rank"
            sums[step.number] = add_counts(sums.get(step.number, NOTHING), step.local)
            present[step.number] = present.get(step.number, 0) + 1
    if run.missing:
        raise Unknown("what a rank without a trace put into the steps is not known")
    retired = {r: len(f.record.steps) for r, f in run.facts.items() if f.retired}
    failed = min((f.failed for f in run.facts.values() if f.failed is not None), default=None)
    for rank, of_rank in run.facts.items():
        for step in of_rank.record.steps:
            there = present[step.number] + sum(n <= step.number for n in retired.values())
            if there < run.world_size or (failed is not None and step.number >= failed):
                continue
            found = sums[step.number]
            scales = loss_scale(run.world_size, found.weight, step.total.weight) / run.world_size
            if found != step.total or abs(scales - 1) > TOLERANCE:
                told, put_in = wording.counts(step.total), wording.counts(found)
                return (
                    f"in step {step.number} rank {rank} scales by {told}, and the ranks put in "
                    f"{put_in}: their scales add up to {scales:.6g} times the mean"
                )
            due = promises.block_of(step.number, run.config.accumulation_steps, sums)
            if run.finished and step.block != due:
                return f"step {step.number} is in {step.block}, not in {due}"
    return None


def uniform_abort(run: Run) -> str | None:
    """All ranks end alike; if one fails, all end with an error that names a rank that failed, at
    the same step. (A rank that lost another one ends where it noticed.)"""
    outcomes = {r: f.record.outcome for r, f in run.facts.items() if f.record.outcome is not None}
    alike = {r: o for r, o in outcomes.items() if not isinstance(o, Lost)}
    first = next(iter(alike.items()), None)
    for rank, outcome in alike.items():
        if first is not None and outcome != first[1]:
            return f"rank {first[0]} ends with {first[1]}, rank {rank} with {outcome}"
        if isinstance(outcome, AbortedBy) and outcome.rank in run.facts:
            if run.facts[outcome.rank].failed is None:
                return f"rank {rank} ends as rank {outcome.rank} failed, which has not failed"
        elif isinstance(outcome, Finished):
            for other, of_rank in run.facts.items():
                if of_rank.failed is not None and of_rank.record.outcome is not None:
                    return f"rank {rank} finishes, although rank {other} failed"
    if not outcomes:
        raise Unknown("no trace has an end")
    return None


# ---------------------------------------------------------------- those of the small scope


def step_alignment(run: Run) -> str | None:
    """Every rank takes the same steps in the same rounds; fewer only where it had to stop."""
    return promises.step_alignment(run.epoch)


def quota_closure(run: Run) -> str | None:
    """As in the small scope, for an epoch that finishes."""
    if run.config.mode is not Mode.QUOTA:
        raise NotAsked("join mode")
    if not run.finished:
        raise Unknown("the epoch did not finish on all ranks")
    found = promises.quota_closure(run.epoch)
    holding = [bool(rank.held) for rank in run.epoch.record.ranks]
    if found is None and run.config.quota is None and all(holding):
        return "the epoch has ended, and every rank still holds samples"
    return found


def bounded_termination(run: Run) -> str | None:
    """As in the small scope: no more steps than the largest shard has samples."""
    if run.missing:
        raise Unknown("how many samples a rank without a trace has is not known")
    return promises.bounded_termination(run.epoch)


def _of_samples(promise: promises.Promise) -> Callable[[Run], str | None]:
    def judge(run: Run) -> str | None:
        unsound = [rank for rank, of_rank in run.facts.items() if not of_rank.sound]
        if unsound:
            raise Unknown(f"rank {unsound[0]} handles samples that have not arrived")
        return promise(run.epoch)

    return judge


PROMISES: Mapping[str, Callable[[Run], str | None]] = {
    "step-alignment": step_alignment,
    "identity-coverage": identity_coverage,
    "quota-closure": quota_closure,
    "budget": _of_samples(promises.budget),
    "bounded-memory": _of_samples(promises.bounded_memory),
    "bounded-delay": _of_samples(promises.bounded_delay),
    "bounded-termination": bounded_termination,
    "uniform-abort": uniform_abort,
    "exact-gradient": exact_gradient,
}
"""Every promise that a recorded run can break, by name."""


def judge(run: Run) -> tuple[PromiseResult, ...]:
    """Judge a run by every promise."""
    return tuple(_judged(name, promise, run) for name, promise in PROMISES.items())


def _judged(name: str, promise: Callable[[Run], str | None], run: Run) -> PromiseResult:
    try:
        text = promise(run)
    except Unknown as why:
        return PromiseResult(name, Judged.UNKNOWN, str(why))
    except NotAsked as why:
        return PromiseResult(name, Judged.NOT_ASKED, str(why))
    if text is None:
        return PromiseResult(name, Judged.HOLDS)
    return PromiseResult(name, Judged.BROKEN, words.plain(text))
