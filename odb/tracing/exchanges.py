"""Compares what ranks were told in an exchange with what all of them posted in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import NamedTuple

from odb.tracing import wording
from odb.tracing.facts import Exchanged, RankFacts
from odb.tracing.report import Divergence, Kind
from spec.exchange import Tally, decode, encode, merge
from spec.messages import PostCounts, PostReport, ShareReason, ShareSpare, Tallied, Totalled
from spec.samples import Counts, add_counts

WHAT = {
    PostReport: "of reports",
    PostCounts: "of counts",
    ShareSpare: "of a spare sample",
    ShareReason: "of the reason of a failure",
}
"""What is exchanged, by the command."""


class Placed(NamedTuple):
    """A divergence, and its place in the order of causes: how many results every rank had taken,
    and whether it is in what was done then (0), posted (1), or told (2)."""

    results: int
    phase: int
    divergence: Divergence


def compare(facts: Mapping[int, RankFacts], world_size: int) -> Iterator[Placed]:
    """Every exchange in which ranks do not agree, in order; the first of each rank."""
    results = 0
    for number in range(max((len(f.exchanges) for f in facts.values()), default=0)):
        here = {
            rank: (of_rank, of_rank.exchanges[number])
            for rank, of_rank in facts.items()
            if number < len(of_rank.exchanges)
        }
        (lowest, (_, first)), *others = sorted(here.items())
        for rank, (of_rank, one) in others:
            wrong = _meeting(lowest, first, one)
            if wrong is not None:
                yield Placed(results, 1, _divergence(rank, of_rank, one, *wrong))
        if {type(one.command) for _, one in here.values()} != {type(first.command)}:
            return
        if isinstance(first.command, PostReport):
            found = _reports(here, world_size)
        elif isinstance(first.command, PostCounts):
            found = _counts(here, world_size)
        else:
            continue
        yield from (Placed(results, 2, divergence) for divergence in found)
        results += 1


Here = Mapping[int, tuple[RankFacts, Exchanged]]


def _meeting(lowest: int, first: Exchanged, one: Exchanged) -> tuple[str, str] | None:
    """Whether two ranks are in the same exchange."""
    ours, theirs = first.command, one.command
    if type(ours) is not type(theirs):
        return (
            f"has every rank in the same exchange, and rank {lowest} is in one {WHAT[type(ours)]}",
            f"the rank is in one {WHAT[type(theirs)]}",
        )
    if isinstance(ours, ShareSpare | ShareReason) and ours != theirs:
        return f"(rank {lowest}) {wording.command(ours)}", wording.command(theirs)
    if (
        isinstance(ours, PostCounts)
        and isinstance(theirs, PostCounts)
        and len(ours.counts) != len(theirs.counts)
    ):
        return (
            f"has as many steps on all ranks, and rank {lowest} {wording.command(ours)}",
            wording.command(theirs),
        )
    return None


def _reports(here: Here, world_size: int) -> Iterator[Divergence]:
    posts = {r: e.command.tally for r, (_, e) in here.items() if isinstance(e.command, PostReport)}
    told = {r: e.result.tally for r, (_, e) in here.items() if isinstance(e.result, Tallied)}
    # As on the wire, which merges by an element-wise maximum.
    together: Tally = decode(encode(reduce(merge, posts.values())))
    for rank, tally in told.items():
        expected = together
        if len(posts) < world_size:  # what the ranks that are not here posted is unknown
            expected = merge(merge(together, tally), next(iter(told.values())))
        if tally != expected:
            want, found = wording.tally_difference(expected, tally)
            spec = f"merges the reports of all ranks: {want}"
            yield _divergence(rank, *here[rank], spec, f"rank {rank} was told: {found}")


def _counts(here: Here, world_size: int) -> Iterator[Divergence]:
    posts = {r: e.command.counts for r, (_, e) in here.items() if isinstance(e.command, PostCounts)}
    told = {r: e.result.totals for r, (_, e) in here.items() if isinstance(e.result, Totalled)}
    if len(set(map(len, posts.values()))) > 1:
        return  # said already
    sums = tuple(reduce(add_counts, of_step) for of_step in zip(*posts.values(), strict=True))
    whole = len(posts) == world_size
    expected = sums if whole else next(iter(told.values()), sums)
    for rank, totals in told.items():
        for i, (want, found) in enumerate(zip(expected, totals, strict=False)):
            low = not whole and any(map(int.__lt__, found, sums[i]))
            if want != found or low:
                spec = f"adds up step {i + 1} of the round: {_sum(sums[i] if low else want, low)}"
                said = f"rank {rank} was told {wording.counts(found)}"
                yield _divergence(rank, *here[rank], spec, said)
                break
        else:
            if len(totals) != len(expected):
                spec = f"has totals of {len(expected)} steps"
                yield _divergence(rank, *here[rank], spec, f"the rank was told {len(totals)}")


def _sum(counts: Counts, at_least: bool) -> str:
    return ("at least " if at_least else "") + wording.counts(counts)


def _divergence(rank: int, facts: RankFacts, one: Exchanged, spec: str, said: str) -> Divergence:
    return Divergence(
        kind=Kind.EXCHANGE,
        path=facts.trace.path,
        line=one.told_at or one.posted_at,
        rank=rank,
        round=one.round,
        step=one.step,
        spec=spec,
        trace=said,
    )
