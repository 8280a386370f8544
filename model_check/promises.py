"""The promises about a whole epoch, each one a function that returns what is wrong, or None.

They look at what every rank did (`spec.lockstep.EpochRecord`), whoever ran it, and recompute all
that they need from the samples themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise

from spec.config import Config, Idle, Mode
from spec.grouping import by_length, load_of_group, within
from spec.lockstep import EpochRecord, RankRecord
from spec.messages import Block, Finished
from spec.samples import NOTHING, Counts, Sample, add_counts, counts_of, trainable


@dataclass(frozen=True)
class Epoch:
    """An epoch to be judged: what went in and what every rank did with it."""

    config: Config
    shards: Sequence[Sequence[Sample]]
    record: EpochRecord


Promise = Callable[[Epoch], str | None]


def step_alignment(epoch: Epoch) -> str | None:
    """Every rank takes the same number of steps, in the same rounds. (With idle stop, a rank's
    steps are the first ones: it takes all that come while it has samples.)"""
    longest = max((rank.steps for rank in epoch.record.ranks), key=len)
    plan = [(step.number, step.round) for step in longest]
    if [number for number, _ in plan] != list(range(len(plan))):
        return f"steps are numbered {[number for number, _ in plan]}"
    for r, rank in enumerate(epoch.record.ranks):
        mine = [(step.number, step.round) for step in rank.steps]
        if mine != plan[: len(mine)]:
            return f"rank {r} takes (step, round) {mine}, another rank {plan}"
        if len(mine) < len(plan) and rank.retired_after != len(mine):
            return f"rank {r} takes {len(mine)} steps, another rank {len(plan)}"
    return None


def identity_coverage(epoch: Epoch) -> str | None:
    """Every sample that a rank has read is delivered once, or filtered, or (only where the epoch
    ends by quota) still held. In join mode everything is read and nothing is held."""
    for r, (shard, rank) in enumerate(zip(epoch.shards, epoch.record.ranks, strict=True)):
        out = [s for step in rank.steps for s in step.group] + rank.filtered + list(rank.held)
        read = len(rank.entered) if epoch.config.mode is Mode.QUOTA else len(shard)
        if sorted(out) != sorted(shard[:read]):
            return f"rank {r} read {list(shard[:read])} and accounts for {sorted(out)}"
        if epoch.config.mode is Mode.JOIN and rank.held:
            return f"rank {r} still holds {rank.held}"
        if any(trainable(s) for s in rank.filtered):
            return f"rank {r} filtered {rank.filtered}"
    return None


def quota_closure(epoch: Epoch) -> str | None:
    """In quota mode all ranks stop at the first step at which the global quota is met (or, if there
    are too few samples, with the last one); without a quota before any rank would idle."""
    if epoch.config.mode is not Mode.QUOTA:
        return None
    totals = [total.samples for total in _totals(epoch.record)]
    quota = epoch.config.quota
    if quota is None:
        idle = [r for r, rank in enumerate(epoch.record.ranks) if any(s.idle for s in rank.steps)]
        return f"ranks {idle} idle" if idle else None
    before = [0, *accumulate(totals)][:-1]
    if any(delivered >= quota for delivered in before):
        return f"steps of {totals} samples go on behind the quota of {quota}"
    there = sum(trainable(s) for shard in epoch.shards for s in shard)
    if sum(totals) < min(quota, there):
        return f"{sum(totals)} samples delivered of {there}, the quota is {quota}"
    return None


def budget(epoch: Epoch) -> str | None:
    """A group of two or more samples is within every budget."""
    for r, rank in enumerate(epoch.record.ranks):
        for step in rank.steps:
            if step.group and not within(epoch.config.budget, load_of_group(step.group)):
                return f"rank {r} step {step.number}: {step.group}"
    return None


def full_groups(epoch: Epoch) -> str | None:
    """No group that a rank forms could take the longest sample of the next one: what makes groups
    smaller is alignment to the other ranks, and nothing else."""
    for r, rank in enumerate(epoch.record.ranks):
        for round_, groups in enumerate(rank.formed):
            ordered = sorted(groups, key=lambda group: by_length(group[0]))
            for group, following in pairwise(ordered):
                if within(epoch.config.budget, load_of_group((*group, following[0]))):
                    return f"rank {r} round {round_}: {group} leaves out {following[0]}"
    return None


def bounded_memory(epoch: Epoch) -> str | None:
    """No rank ever holds more samples than the window, and the samples of the steps that wait for
    their block: of one step less than a block has. (In an epoch that is cut short some of these
    were never emitted; none has more samples than a window.)"""
    window, others = epoch.config.window, epoch.config.accumulation_steps - 1
    for r, rank in enumerate(epoch.record.ranks):
        largest = sorted(len(step.group) for step in rank.steps)
        waiting = sum(largest[::-1][:others])
        if not isinstance(rank.outcome, Finished):
            waiting = window * others
        if rank.most_held > window + waiting:
            return f"rank {r} held {rank.most_held} samples"
    return None


def bounded_delay(epoch: Epoch) -> str | None:
    """The oldest sample of a window leaves in the next round, so that a sample leaves within as
    many rounds as there are samples in the window when it enters, itself included."""
    for r, rank in enumerate(epoch.record.ranks):
        for step in rank.steps:
            for s in step.group:
                waited = step.round - rank.entered[s.seq] + 1
                if waited > epoch.config.window:
                    return f"rank {r}: {s} left after {waited} rounds"
    return None


def bounded_termination(epoch: Epoch) -> str | None:
    """In every round but the last each rank that holds samples delivers at least one for each step:
    no more steps, and no more rounds than the largest shard has samples. One more round ends the
    epoch; before that, another one emits a block that was not full."""
    bound = max(sum(trainable(s) for s in shard) for shard in epoch.shards)
    steps = max(len(rank.steps) for rank in epoch.record.ranks)
    more = 1 + (steps % epoch.config.accumulation_steps > 0)
    if steps > bound or epoch.record.rounds > bound + more:
        return f"{steps} steps in {epoch.record.rounds} rounds, the bound is {bound}"
    return None


def exact_gradient(epoch: Epoch) -> str | None:
    """The totals by which losses are scaled are the sums of what the ranks contribute, positive,
    and an idle rank contributes nothing. A block's are the sums of its steps', and blocks are so
    many steps in a row, but for the last one of the epoch."""
    sums: dict[int, Counts] = {}
    for rank in epoch.record.ranks:
        for step in rank.steps:
            if step.local != counts_of(step.group):
                return f"step {step.number} counts {step.local} for {step.group}"
            sums[step.number] = add_counts(sums.get(step.number, NOTHING), step.local)
    for rank in epoch.record.ranks:
        for step in rank.steps:
            if step.total != sums[step.number] or step.total.weight <= 0:
                return f"step {step.number} has totals {step.total}, the sum is {sums[step.number]}"
            due = block_of(step.number, epoch.config.accumulation_steps, sums)
            if step.block != due:
                return f"step {step.number} is in {step.block}, not in {due}"
    return None


def block_of(number: int, size: int, sums: Mapping[int, Counts]) -> Block:
    """What a step has to know of its block, in an epoch whose steps come to these sums."""
    first = number - number % size
    totals = [sums[i] for i in range(first, first + size) if i in sums]
    return Block(number - first, len(totals), reduce(add_counts, totals))


def idle_mode(epoch: Epoch) -> str | None:
    """A rank idles only behind its last sample, and has one to make the idle step of; with idle
    stop it retires instead."""
    for r, rank in enumerate(epoch.record.ranks):
        idle = [step.idle for step in rank.steps]
        if idle != sorted(idle):
            return f"rank {r} idles between samples"
        if rank.spareless:
            return f"rank {r} has nothing to idle with in step {rank.spareless[0]}"
        if epoch.config.idle is Idle.STOP and any(idle):
            return f"rank {r} idles although it should stop"
    return None


PROMISES: Mapping[str, Promise] = {
    "step-alignment": step_alignment,
    "identity-coverage": identity_coverage,
    "quota-closure": quota_closure,
    "budget": budget,
    "full-groups": full_groups,
    "bounded-memory": bounded_memory,
    "bounded-delay": bounded_delay,
    "bounded-termination": bounded_termination,
    "exact-gradient": exact_gradient,
    "idle-mode": idle_mode,
}
"""Every promise about an epoch that ends by itself, by name."""


def violations(epoch: Epoch) -> dict[str, str]:
    """What is wrong with an epoch, by promise."""
    found = {name: promise(epoch) for name, promise in PROMISES.items()}
    return {name: text for name, text in found.items() if text is not None}


def _totals(record: EpochRecord) -> list[Counts]:
    longest: RankRecord = max(record.ranks, key=lambda rank: len(rank.steps))
    return [step.total for step in longest.steps]
