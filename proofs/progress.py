"""Every epoch ends, after a bounded number of rounds and steps; and no sample waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from model_check.prover import OUTSIDE, Obligation, Source, both, either, implies
from proofs.agreement import MODES, Deciding
from proofs.reports import bounds, lifted, some_report, some_tally
from proofs.theorem import Theorem
from spec import exchange
from spec.config import Config
from spec.exchange import Decision, Flush, Report, Steps, Tally
from spec.variants import rules

JOINING = {name: config for name, config in MODES.items() if "join" in name}
SHIPPED = Deciding(MODES["join, idle pad"])


class _Rank:
    """An arbitrary rank in a round: what it has to deliver in the epoch, what of that is `left`
    (in its window or still to come), and its report."""

    def __init__(self, source: Source, name: str, window: Any, steps: Any) -> None:
        self.shard, self.left = source.int(f"shard of {name}"), source.int(f"left on {name}")
        self.report: Report = some_report(source, name, window)
        source.assume(both(self.left >= 0, self.shard >= 0))
        source.assume(self.on_schedule(self.left, steps))
        # A rank that wants no step has nothing left (identity-coverage: it is drained); one that
        # does holds as many samples as it says.
        source.assume(implies(self.report.want == 0, self.left == 0))
        source.assume(implies(self.report.want >= 1, self.report.limit <= self.left))

    def on_schedule(self, left: Any, steps: Any) -> Any:
        """The invariant: every step so far took a sample of the rank, or nothing is left."""
        return either(left == 0, left + steps <= self.shard)


class _Round:
    """A round of ranks that are sound, with the report of any rank, of the one that wants most and
    of the one that can take least; `rounds` and `steps` are behind it."""

    def __init__(self, source: Source) -> None:
        window, world_size = source.int("window"), source.int("W")
        self.rounds, self.steps = source.int("rounds"), source.int("steps")
        source.assume(both(window >= 1, world_size >= 1))
        source.assume(both(self.rounds >= 0, self.rounds <= self.steps))
        self.any, self.most, self.least = (
            _Rank(source, name, window, self.steps)
            for name in ("any rank", "the greediest", "the scarcest")
        )
        self.world_size, self.tally = world_size, some_tally(source, "tally")
        for number, of in enumerate((self.any, self.most, self.least)):
            seat = source.int(f"seat {number}")
            source.assume(both(seat >= 0, seat < world_size))
            source.assume(bounds(self.tally, lifted(of.report, seat, world_size)))
        source.assume(self.tally.want == self.most.report.want)
        source.assume(self.tally.limit == self.least.report.limit)

    def decision(self, f: Deciding) -> Decision:
        """What all ranks do."""
        return f.decide(f.config, self.world_size, self.tally, f.target(self.tally))


def _stays_on_schedule(source: Source, f: Deciding) -> Callable[[], Any]:
    round_ = _Round(source)
    delivered = source.int("delivered by any rank")

    def claim() -> Any:
        decision = round_.decision(f)
        if not isinstance(decision, Steps):
            return OUTSIDE
        of, target = round_.any, decision.target
        # Its groups are exactly T and not empty (alignment-succeeds); idle steps take nothing.
        if of.report.want == 0:
            return of.on_schedule(of.left, round_.steps + target)
        if target > of.left:
            return False
        if not both(delivered >= target, delivered <= of.left):
            return OUTSIDE
        return of.on_schedule(of.left - delivered, round_.steps + target)

    return claim


def _bounded(source: Source, f: Deciding) -> Callable[[], Any]:
    round_ = _Round(source)

    def claim() -> Any:
        decision = round_.decision(f)
        if not isinstance(decision, Steps):
            return OUTSIDE
        steps = round_.steps + decision.target
        return both(steps <= round_.most.shard, round_.rounds + 1 <= steps)

    return claim


def _ends(source: Source, f: Deciding) -> Callable[[], Any]:
    world_size, tally = source.int("W"), some_tally(source, "tally")
    source.assume(both(world_size >= 1, tally.want == 0))
    source.assume(both(tally.any_waiting >= 0, tally.any_waiting <= 1))

    def claim() -> Any:
        decision = f.decide(f.config, world_size, tally, f.target(tally))
        if isinstance(decision, Flush):
            return tally.any_waiting >= 1  # and behind it no step waits any more
        return not isinstance(decision, Steps)

    return claim


def _flushes_for_ever(config: Config, world_size: int, tally: Tally, target: int) -> Decision:
    return exchange.decide(config, world_size, tally._replace(any_waiting=1), target)


def _asks_again(config: Config, world_size: int, tally: Tally, target: int) -> Decision:
    """One round more when all is done, to be sure."""
    if tally.want == 0:
        return Steps(1, None)
    return exchange.decide(config, world_size, tally, target)


def _for_join(name: str, says: str, body: Any, mutants: dict[str, Any]) -> list[Obligation]:
    return [
        Obligation(
            f"{name} ({mode})",
            says,
            body,
            replace(SHIPPED, config=config),
            {m: replace(mutant, config=config) for m, mutant in mutants.items()},
        )
        for mode, config in JOINING.items()
    ]


IGNORES_SMALLEST = replace(SHIPPED, target=rules.ignore_smallest)
ONE_MORE = replace(SHIPPED, target=rules.slots_by_inputs_read)
ONE_FEWER = replace(SHIPPED, target=rules.one_fewer)

TERMINATION = Theorem(
    promise="bounded-termination",
    states=(
        "A join epoch of sound ranks has no more steps than the largest shard has samples, and no "
        "more rounds than that and one; with blocks of several steps, one more, for the last block."
    ),
    assumes=(
        "Reports as sound ranks post them, and a rank that wants no step is drained "
        "(identity-coverage). A rank that takes T steps delivers at least one sample in each "
        "(alignment-succeeds)."
    ),
    reasoning=(
        "For each rank, the samples that are left and the steps so far add up to no more than its "
        "shard, or nothing is left: every round keeps that. So the steps still possible, shard "
        "minus steps, shrink with each round by T >= 1 on the rank that wants most, and never "
        "below 0. Each round has a step, but for the last two. When no rank wants one, the "
        "decision is not Steps: it is to emit what waits for its block, behind which no step "
        "waits (identity-coverage), or to end."
    ),
    leaves_out=(
        "That inputs answer: a rank whose input never ends and never delivers is stuck. Quota "
        "mode, failures and stops, which end an epoch sooner: explored."
    ),
    obligations=(
        *_for_join(
            "on schedule",
            "after T steps a rank has T samples fewer at least, or none",
            _stays_on_schedule,
            {"T ignores the smallest sample count": IGNORES_SMALLEST},
        ),
        *_for_join(
            "bound",
            "steps never exceed the largest shard, and rounds never exceed steps",
            _bounded,
            {"T is one lower": ONE_FEWER, "T is one higher": ONE_MORE},
        ),
        *_for_join(
            "end",
            "a round in which nobody wants a step is the last, or emits steps that wait",
            _ends,
            {
                "asks again": replace(SHIPPED, decide=_asks_again),
                "emits the last block for ever": replace(SHIPPED, decide=_flushes_for_ever),
            },
        ),
    ),
)
