"""Events, commands and states in the words of the protocol, for messages about traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from model_check.render import words
from odb.tracing.encoding import STATE_FIELDS
from spec.exchange import Tally
from spec.messages import (
    Arrived,
    Block,
    Closed,
    Command,
    Emit,
    Emitted,
    End,
    Event,
    Failed,
    Filter,
    GiveUp,
    InputEnded,
    KeepSpare,
    PeerLost,
    PostCounts,
    PostReport,
    Pull,
    Retire,
    ShareReason,
    ShareSpare,
    Tallied,
    Totalled,
)
from spec.samples import Counts

MOST_NAMED = 12
"""Samples that a sentence names; of more it says how many there are."""


def command(one: Command) -> str:
    """A command as the rest of a sentence that begins with who gives it."""
    match one:
        case Pull(limit):
            return f"asks for up to {words.many(limit, 'sample')}"
        case Filter(sample):
            return f"filters sample {sample.seq}"
        case KeepSpare(sample):
            return f"keeps sample {sample.seq} as its spare"
        case PostReport(tally):
            return f"posts a report ({_report(tally)})"
        case ShareSpare(donor):
            return f"shares the spare sample of rank {donor}"
        case PostCounts(counts):
            return f"posts counts for {words.many(len(counts), 'step')}"
        case Emit(step) if step.idle:
            return f"emits step {step.number}, idle"
        case Emit(step):
            return f"emits step {step.number} with {names([s.seq for s in step.group])}"
        case Retire():
            return "tells its trainer that its steps are over (idle stop)"
        case GiveUp():
            return "ends its trainer with an error, as it cannot make even an idle step"
        case ShareReason(rank):
            return f"shares the reason why rank {rank} failed"
        case End(outcome):
            return f"ends the epoch: {words.outcome(outcome)}"


def commands(several: Sequence[Command]) -> str:
    """Several commands."""
    return words.listed(map(command, several)) if several else "does nothing more"


def in_detail(one: Command) -> str:
    """A command with all its numbers, where two read the same otherwise."""
    match one:
        case Emit(step):
            local, total = counts(step.local), counts(step.total)
            here = names([s.seq for s in step.group], most=len(step.group))
            return (
                f"emits step {step.number} of round {step.round} with {here} ({local}; on all "
                f"ranks {total}; {_block(step.block)})"
            )
        case PostCounts(several):
            return f"posts counts: {'; '.join(map(counts, several))}"
        case PostReport(tally):
            return f"posts a report of {tally_fields(tally)}"
        case _:
            return repr(one)


def _block(block: Block | None) -> str:
    if block is None:
        return "of no block"
    return f"{block.place + 1} of a block of {block.steps}, in all {counts(block.total)}"


def event(one: Event) -> str:
    """What has happened, by its name in the spec."""
    match one:
        case Arrived(samples):
            return f"Arrived: {names([s.seq for s in samples])}"
        case Tallied(tally):
            return f"Tallied: {_report(tally)}"
        case Totalled(totals):
            return f"Totalled: totals of {words.many(len(totals), 'step')}"
        case PeerLost(None):
            return "PeerLost: a rank was lost"
        case PeerLost(rank):
            return f"PeerLost: rank {rank} was lost"
        case Failed():
            return "Failed: the pipeline of the rank broke"
        case Closed():
            return "Closed: the trainer stopped early"
        case InputEnded():
            return "InputEnded: there are no more samples"
        case Emitted():
            return "Emitted: the step at hand is in the queue"


def names(seqs: Sequence[int], most: int = MOST_NAMED) -> str:
    """Samples by their numbers, or only how many they are."""
    if len(seqs) <= most:
        numbers = words.listed(map(str, seqs))
        return f"sample{'' if len(seqs) == 1 else 's'} {numbers}" if seqs else "no sample"
    in_a_row = list(seqs) == list(range(seqs[0], seqs[0] + len(seqs)))
    which = f"{seqs[0]} to {seqs[-1]}" if in_a_row else f"{seqs[0]}, {seqs[1]}, ..., {seqs[-1]}"
    return f"{len(seqs)} samples ({which})"


def counts(one: Counts) -> str:
    """What a step adds up to."""
    samples, tokens = words.many(one.samples, "sample"), words.many(one.tokens, "token")
    return f"{samples}, {tokens}, loss weight {one.weight}"


def _report(tally: Tally) -> str:
    return f"{words.many(tally.want, 'step')} wanted, at most {tally.limit} possible"


def tally_fields(tally: Tally) -> str:
    """The fields of a tally but its terms, unless these differ."""
    parts = [f"{name} {value}" for name, value in zip(tally._fields[2:], tally[2:], strict=True)]
    for term, low, high in zip(tally.low._fields, tally.low, tally.high, strict=True):
        if low != high or term in ("epoch", "round", "step"):
            parts.append(f"{term} {low}" if low == high else f"{term} from {low} to {high}")
    return ", ".join(parts)


def tally_difference(ours: Tally, theirs: Tally) -> tuple[str, str]:
    """The first field in which two tallies differ, in each."""
    for name, own, other in zip(ours._fields, ours, theirs, strict=True):
        if own != other and isinstance(own, tuple) and isinstance(other, tuple):
            for term, a, b in zip(ours.low._fields, own, other, strict=True):
                if a != b:
                    return f"{name} {term} {a}", f"{name} {term} {b}"
        if own != other:
            return f"{name} {own}", f"{name} {other}"
    return "the same", "the same"


def states(ours: Sequence[Any], theirs: Any) -> tuple[str, str]:
    """The first part in which two summaries of a state differ, in each."""
    if isinstance(theirs, list) and len(theirs) == len(ours):
        for name, own, other in zip(STATE_FIELDS, ours, theirs, strict=True):
            if own != other:
                return f"{name}: {own}", f"{name}: {other}"
    return f"the state {ours}", f"{theirs}"


def alternatives(items: Iterable[str]) -> str:
    """Items of which one is meant: a, b or c."""
    *first, last = items
    return f"{', '.join(first)} or {last}" if first else last
