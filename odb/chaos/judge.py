"""Compares what a run did with what is promised for its fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from odb.chaos.draw import RANK_NAMES, Kind, Layout, Scenario
from odb.chaos.job import EpochSeen, RankSeen
from odb.tracing import Verdict


class Ending(Enum):
    """How a rank's training ends."""

    COMPLETE = "no error"
    OWN_FAILURE = "PipelineError"
    PEER_FAILURE = "PeerFailedError"
    PEER_LOST = "PeerLostError"
    TIMEOUT = "ExchangeTimeoutError"
    KILLED = "killed"


@dataclass(frozen=True)
class Promise:
    """What is promised for a kind of fault that happened.

    victim, others: how the rank with the fault ends, and all others. others_name_it: their errors
    name the victim. same_step: all errors are raised before the same step. traces: the verdicts
    that the check of the traces may have (a divergence never is one).
    """

    victim: Ending
    others: Ending
    others_name_it: bool = False
    victim_names_it: bool = False
    same_step: bool = False
    traces: frozenset[Verdict] = frozenset({Verdict.CONFORMS})


UNHARMED = Promise(Ending.COMPLETE, Ending.COMPLETE)
SOFT = Promise(Ending.OWN_FAILURE, Ending.PEER_FAILURE, True, True, same_step=True)
# Whoever reads a sample that blocks never ends its trace; who lost a rank cannot know its posts.
UNFINISHED = frozenset({Verdict.CONFORMS, Verdict.INCOMPLETE})

PROMISES: Mapping[Kind, Promise] = {
    Kind.NOTHING: UNHARMED,
    Kind.LEAVE: UNHARMED,
    Kind.RAISE_IN_SAMPLE: SOFT,
    Kind.RAISE_IN_BATCH: SOFT,
    Kind.KILL_WORKER: SOFT,
    Kind.KILL_RANK: Promise(Ending.KILLED, Ending.PEER_LOST, True, traces=UNFINISHED),
    # The one that is cut off loses the others, as far as it can tell.
    Kind.DROP_CONNECTION: Promise(Ending.PEER_LOST, Ending.PEER_LOST, True, traces=UNFINISHED),
    Kind.STOP_RANK: UNHARMED,
    Kind.SLOW_RANK: UNHARMED,
    Kind.DELAY_EXCHANGE: UNHARMED,
    Kind.BLOCK_IN_SAMPLE: Promise(
        Ending.TIMEOUT, Ending.TIMEOUT, True, True, same_step=True, traces=UNFINISHED
    ),
}
"""What must become of a run whose fault happened. If it did not, nothing may go wrong."""


@dataclass(frozen=True)
class Traced:
    """What the check of a run's traces says."""

    verdict: Verdict
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observed:
    """What a run did. ranks: what each rank brought home, or None. failures: how it failed if so.
    fired_at: when the fault happened, None if it did not (or there is none)."""

    ranks: tuple[RankSeen | None, ...]
    failures: dict[int, str]
    exit_codes: tuple[int | None, ...]
    fired_at: float | None
    traced: Traced


def judge(scenario: Scenario, observed: Observed) -> tuple[str, ...]:
    """All that is not as promised, a line each; empty if everything is."""
    promise = PROMISES[scenario.kind] if observed.fired_at is not None else UNHARMED
    if _came_too_late(scenario, observed):
        promise = UNHARMED
    problems = [*_processes(scenario, observed, promise)]
    problems += _endings(scenario, observed, promise)
    problems += _same_step(observed, promise)
    problems += _samples(scenario, observed)
    for epoch in range(scenario.epochs):
        problems += _alignment(scenario, observed, epoch)
        problems += _coverage(scenario, observed, epoch)
    if observed.traced.verdict not in promise.traces or observed.traced.problems:
        said = "; ".join(observed.traced.problems) or "nothing more"
        problems.append(f"the traces: {observed.traced.verdict.value}: {said}")
    return tuple(problems)


def _came_too_late(scenario: Scenario, observed: Observed) -> bool:
    """Whether the fault may have happened to something that the run did not need any more: a
    worker reads ahead of the step at which a quota is met."""
    reading = (Kind.RAISE_IN_SAMPLE, Kind.KILL_WORKER, Kind.BLOCK_IN_SAMPLE)
    if scenario.joined or scenario.kind not in reading:
        return False
    return all(_ending(observed, rank) is Ending.COMPLETE for rank in range(scenario.world_size))


# ---------------------------------------------------------------- processes and errors


def _processes(scenario: Scenario, observed: Observed, promise: Promise) -> Iterator[str]:
    for rank, code in enumerate(observed.exit_codes):
        killed = rank == scenario.victim and promise.victim is Ending.KILLED
        failure = observed.failures.get(rank)
        if failure is not None and failure.startswith("had not returned"):
            yield f"rank {rank} hangs: it {failure}"
        elif failure is not None and not (killed and code == -9):
            yield f"rank {rank} brought nothing home: {failure.rstrip().splitlines()[-1]}"
        elif failure is None and code != 0:
            yield f"rank {rank} returned, and its process ended with {code}"


def _ending(observed: Observed, rank: int) -> Ending | None:
    """How a rank ended; None if in no way that is known."""
    seen = observed.ranks[rank]
    if seen is None:
        return Ending.KILLED if observed.exit_codes[rank] == -9 else None
    if seen.error is None:
        return Ending.COMPLETE
    known = {ending.value: ending for ending in Ending}
    return known.get(seen.error.name)


def _endings(scenario: Scenario, observed: Observed, promise: Promise) -> Iterator[str]:
    for rank, seen in enumerate(observed.ranks):
        is_victim = rank == scenario.victim
        wanted = promise.victim if is_victim else promise.others
        ending = _ending(observed, rank)
        if seen is None:
            if ending is not wanted:
                yield f"rank {rank} should have ended with {wanted.value}, and did not return"
            continue
        error = seen.error
        text = "no error" if error is None else f"{error.name}: {error.text}"
        if ending is not wanted:
            if is_victim or not _had_all(scenario, promise, rank, seen):
                yield f"rank {rank} should have ended with {wanted.value}, and ended with {text}"
            continue
        if error is None or not (promise.victim_names_it if is_victim else promise.others_name_it):
            continue
        named = error.missing if ending is Ending.TIMEOUT else (error.rank,)
        if named != (scenario.victim,):
            yield f"rank {rank} should have named rank {scenario.victim}, not {named}: {text}"


def _had_all(scenario: Scenario, promise: Promise, rank: int, seen: RankSeen) -> bool:
    """Whether a rank may end well although another failed: nothing was left to do for it. A lost
    rank may have been lost behind the last exchange; a drained one may have stopped before."""
    may = promise.others is Ending.PEER_LOST or scenario.stops_idle
    if not may or seen.error is not None or len(seen.epochs) < scenario.epochs:
        return False
    if not all(epoch.complete for epoch in seen.epochs):
        return False
    if scenario.joined and scenario.layout is Layout.OWN:
        wanted = _wanted_of(scenario, rank)
        return all(set(_names(epoch)) == wanted for epoch in seen.epochs)
    return True


def _wanted_of(scenario: Scenario, rank: int) -> set[int]:
    """The samples of a rank with a shard of its own that are to be delivered."""
    shard = scenario.shards[rank]
    return {rank * RANK_NAMES + i for i, length in enumerate(shard) if length}


def _same_step(observed: Observed, promise: Promise) -> Iterator[str]:
    steps = {}
    for rank, seen in enumerate(observed.ranks):
        if seen is None or seen.error is None or not seen.error.stepping:
            continue
        taken = len(seen.epochs[-1].steps)
        if seen.error.step != taken:
            yield f"rank {rank} took {taken} steps; its error says step {seen.error.step}"
        steps[rank] = taken
    if promise.same_step and len(set(steps.values())) > 1:
        yield f"the ranks end at different steps: {steps}"


# ---------------------------------------------------------------- samples and steps


def _names(epoch: EpochSeen) -> list[int]:
    return [name for step in epoch.steps for name in step.names]


def _epochs(observed: Observed, epoch: int) -> dict[int, EpochSeen]:
    """What each rank saw of an epoch, if it came to it."""
    return {
        rank: seen.epochs[epoch]
        for rank, seen in enumerate(observed.ranks)
        if seen is not None and len(seen.epochs) > epoch
    }


def doubled(observed: Observed, epoch: int) -> list[int]:
    """The samples that were delivered more than once in an epoch."""
    names = Counter(n for seen in _epochs(observed, epoch).values() for n in _names(seen))
    return sorted(name for name, times in names.items() if times > 1)


def lost(scenario: Scenario, observed: Observed, epoch: int) -> list[int]:
    """The samples that should have been delivered in an epoch and were not: none are asked for if
    a rank ended early, or a quota was met."""
    of_ranks = _epochs(observed, epoch)
    if not scenario.joined or not _all_complete(scenario, of_ranks):
        return []
    delivered = {name for seen in of_ranks.values() for name in _names(seen)}
    return sorted(n for n, length in scenario.names().items() if length and n not in delivered)


def _all_complete(scenario: Scenario, of_ranks: Mapping[int, EpochSeen]) -> bool:
    everyone = len(of_ranks) == scenario.world_size
    return everyone and all(seen.complete for seen in of_ranks.values())


def _left(scenario: Scenario, of_ranks: Mapping[int, EpochSeen]) -> bool:
    """Whether the victim's trainer left its epoch: what it then took is no whole epoch."""
    victim = of_ranks.get(scenario.victim)
    return victim is not None and len(victim.steps) == scenario.leave_at


def _samples(scenario: Scenario, observed: Observed) -> Iterator[str]:
    known = scenario.names()
    for epoch in range(scenario.epochs):
        twice = doubled(observed, epoch)
        if twice:
            yield f"epoch {epoch}: samples delivered more than once: {twice[:10]}"
        for rank, seen in _epochs(observed, epoch).items():
            names = _names(seen)
            strange = [n for n in names if not known.get(n)]
            if strange:
                yield f"epoch {epoch}: rank {rank} got samples that are not there: {strange[:10]}"
            if seen.wrong:
                yield f"epoch {epoch}: rank {rank} got {seen.wrong} samples with wrong content"
            if scenario.layout is Layout.OWN:
                others = [n for n in names if n not in _wanted_of(scenario, rank)]
                if others:
                    yield f"epoch {epoch}: rank {rank} got samples of others: {others[:10]}"


def _alignment(scenario: Scenario, observed: Observed, epoch: int) -> Iterator[str]:
    """All ranks take the same steps in the same rounds; fewer only where one ended early."""
    of_ranks = _epochs(observed, epoch)
    plans = {
        rank: [(step.step, step.round, step.global_samples) for step in seen.steps]
        for rank, seen in of_ranks.items()
    }
    if not plans:
        return
    longest = max(plans.values(), key=len)
    if [step for step, _, _ in longest] != list(range(len(longest))):
        yield f"epoch {epoch}: steps are not numbered one by one"
    whole = _all_complete(scenario, of_ranks)
    for rank, plan in plans.items():
        if plan != longest[: len(plan)]:
            yield f"epoch {epoch}: rank {rank} took other steps, or in other rounds"
        early = scenario.stops_idle or (rank == scenario.victim and _left(scenario, of_ranks))
        if whole and not early and len(plan) < len(longest):
            yield f"epoch {epoch}: rank {rank} took {len(plan)} steps, others {len(longest)}"


def _coverage(scenario: Scenario, observed: Observed, epoch: int) -> Iterator[str]:
    of_ranks = _epochs(observed, epoch)
    no_error = all(seen is not None and seen.error is None for seen in observed.ranks)
    left = _left(scenario, of_ranks)
    if no_error and not left and not _all_complete(scenario, of_ranks):
        yield f"epoch {epoch} is not complete on every rank, and there is no error"
    if left or not _all_complete(scenario, of_ranks):
        return
    missing = lost(scenario, observed, epoch)
    if missing:
        yield f"epoch {epoch}: {len(missing)} samples were lost: {missing[:10]}"
    if scenario.joined:
        filtered = sum(seen.filtered for seen in of_ranks.values())
        empty = sum(not length for length in scenario.names().values())
        if filtered != empty:
            yield f"epoch {epoch}: {filtered} samples are listed as filtered, {empty} are empty"
        held = sum(seen.undelivered for seen in of_ranks.values())
        if held:
            yield f"epoch {epoch}: {held} samples are listed as undelivered in a whole epoch"
    elif scenario.options["quota"] is not None:
        yield from _quota(scenario, of_ranks, epoch)


def _quota(scenario: Scenario, of_ranks: Mapping[int, EpochSeen], epoch: int) -> Iterator[str]:
    """The epoch ends at the first step at which the quota is met, or with the samples."""
    quota = scenario.options["quota"]
    longest = max((seen.steps for seen in of_ranks.values()), key=len)
    totals = [step.global_samples for step in longest]
    wanted = min(quota, sum(bool(length) for length in scenario.names().values()))
    if sum(totals) < wanted or sum(totals[:-1]) >= quota:
        yield f"epoch {epoch}: {sum(totals)} samples were delivered for a quota of {quota}"


def detection_s(observed: Observed) -> float | None:
    """Seconds from the fault until the last rank had been told; None if nobody was."""
    heard = [seen.heard_at for seen in observed.ranks if seen and seen.heard_at is not None]
    if observed.fired_at is None or not heard:
        return None
    return max(heard) - observed.fired_at
