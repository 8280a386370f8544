"""All ranks take the same decision, at the same place, about as many steps as each can take."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from model_check.prover import Obligation, Source, both, implies, negation
from proofs.reports import bounds, lifted, some_report, some_tally, some_terms
from proofs.theorem import Theorem
from spec import exchange
from spec.config import Budget, Config, Idle, Mode
from spec.exchange import Decision, Finish, Flush, Mismatch, Steps, Tally
from spec.variants import rules


@dataclass(frozen=True)
class Deciding:
    """The functions that these theorems are about, under one of the modes."""

    config: Config
    decide: Callable[[Config, int, Tally, int], Decision] = exchange.decide
    target: Callable[[Tally], int] = exchange.paper_target


MODES = {
    "join, idle pad": Config(Budget(8)),
    "join, idle stop": Config(Budget(8), idle=Idle.STOP),
    "quota mode": Config(Budget(8), mode=Mode.QUOTA),
    "quota mode with a quota": Config(Budget(8), mode=Mode.QUOTA, quota=100),
}
"""`decide` looks at nothing else of a configuration."""

SHIPPED = Deciding(MODES["join, idle pad"])


def _decision(f: Deciding, world_size: Any, tally: Tally) -> Decision:
    return f.decide(f.config, world_size, tally, f.target(tally))


def _facts(decision: Decision) -> tuple[Any, ...]:
    """A decision as values that can be compared one by one."""
    return (type(decision).__name__, *vars(decision).values())


def _same_decision(source: Source, f: Deciding) -> Callable[[], Any]:
    world_size, tally = source.int("W"), some_tally(source, "tally")

    def claim() -> Any:
        mine, theirs = (_facts(_decision(f, world_size, tally)) for _ in range(2))
        if len(mine) != len(theirs) or mine[0] != theirs[0]:
            return False
        return both(*(_equal(a, b) for a, b in zip(mine[1:], theirs[1:], strict=True)))

    return claim


def _equal(a: Any, b: Any) -> Any:
    return (a is None) == (b is None) if a is None or b is None else a == b


def _same_terms(source: Source, f: Deciding) -> Callable[[], Any]:
    world_size, tally = source.int("W"), some_tally(source, "tally")
    mine, theirs = some_terms(source, "mine"), some_terms(source, "theirs")
    for terms in (mine, theirs):
        for low, value, high in zip(tally.low, terms, tally.high, strict=True):
            source.assume(both(low <= value, value <= high))

    def claim() -> Any:
        if isinstance(_decision(f, world_size, tally), Mismatch):
            return True
        return both(*(a == b for a, b in zip(mine, theirs, strict=True)))

    return claim


def _round(source: Source) -> tuple[Any, Tally, list[Any]]:
    """A tally with an arbitrary rank's report in it, and the reports of the ranks that have the
    largest want and the smallest limit."""
    window, world_size = source.int("window"), source.int("W")
    source.assume(both(window >= 1, world_size >= 1))
    tally = some_tally(source, "tally")
    reports = [some_report(source, name, window) for name in ("any", "most", "fewest")]
    for number, report in enumerate(reports):
        rank = source.int(f"rank{number}")
        source.assume(both(rank >= 0, rank < world_size))
        source.assume(bounds(tally, lifted(report, rank, world_size)))
    source.assume(tally.want == reports[1].want)
    source.assume(tally.limit == reports[2].limit)
    return world_size, tally, reports


def _envelope(source: Source, f: Deciding) -> Callable[[], Any]:
    world_size, tally, reports = _round(source)

    def claim() -> Any:
        decision = _decision(f, world_size, tally)
        if not isinstance(decision, Steps):
            return True
        return both(
            decision.target >= 1,
            *(implies(r.want >= 1, decision.target <= r.limit) for r in reports),
        )

    return claim


def _lends(source: Source, f: Deciding) -> Callable[[], Any]:
    """`lacking`: any drained rank without a sample to idle with."""
    world_size, tally, reports = _round(source)
    lacking = reports[0]
    source.assume(both(lacking.want == 0, negation(lacking.has_spare)))

    def claim() -> Any:
        decision = _decision(f, world_size, tally)
        if not isinstance(decision, Steps) or f.config.idle is not Idle.PAD:
            return True
        return decision.donor is not None and decision.donor == tally.spare_from

    return claim


def _finish_means_done(source: Source, f: Deciding) -> Callable[[], Any]:
    world_size, tally, reports = _round(source)

    def claim() -> Any:
        decision = _decision(f, world_size, tally)
        if not isinstance(decision, Finish | Flush):
            return True
        if isinstance(decision, Flush) != bool(tally.any_waiting >= 1):
            return False
        if f.config.mode is Mode.QUOTA and f.config.quota is None:
            return tally.any_drained >= 1
        return both(*(report.want == 0 for report in reports))

    return claim


def _changed(**functions: Any) -> Deciding:
    return replace(SHIPPED, **functions)


def _ignores_terms(config: Config, world_size: int, tally: Tally, target: int) -> Decision:
    return exchange.decide(config, world_size, tally._replace(low=tally.high), target)


def _ends_at_once(config: Config, world_size: int, tally: Tally, target: int) -> Decision:
    return Finish()


class _Fickle:
    """Decides by something of its own: here, by how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, tally: Tally) -> Any:
        self.asked += 1
        return tally.want + self.asked


def _in_every_mode(
    name: str,
    says: str,
    body: Any,
    mutants: dict[str, Any],
    modes: Collection[str] = tuple(MODES),
) -> list[Obligation]:
    return [
        Obligation(
            f"{name} ({mode})",
            says,
            body,
            _changed(config=config),
            {changed: replace(mutant, config=config) for changed, mutant in mutants.items()},
        )
        for mode, config in MODES.items()
        if mode in modes
    ]


AGREEMENT = Theorem(
    promise="step-alignment",
    states=(
        "Any two of any number of ranks take the same decision in a round, and so the same number "
        "of steps with the same numbers in every round: after each round they are at the same "
        "place again. A decision to take steps is never taken by ranks that differ in epoch, "
        "round, step or settings."
    ),
    assumes="Every rank has the same tally (the exchange theorem, and that all_reduce delivers).",
    reasoning=(
        "By induction over rounds. All ranks evaluate `decide` on one tally, so they decide alike. "
        "Unless that is a Mismatch, any two ranks have equal terms, among them round and step. "
        "Each then adds the same number of steps: T, or what the quota leaves of it, which "
        "depends on the totals that all have received (that it does, and numbers its steps so, is "
        "part of identity-coverage)."
    ),
    leaves_out=(
        "Ranks that have died; that a queue and its trainer take every step that is emitted "
        "(explored by `odb verify`, not proved)."
    ),
    obligations=(
        *_in_every_mode(
            "one decision",
            "two ranks with the same tally take the same decision",
            _same_decision,
            {"a rank looks at something of its own": _changed(target=_Fickle())},
        ),
        *_in_every_mode(
            "one place",
            "unless the decision is Mismatch, any two ranks have the same terms",
            _same_terms,
            {"terms are not compared": _changed(decide=_ignores_terms)},
        ),
    ),
)

ENVELOPE = Theorem(
    promise="target-envelope",
    states=(
        "Whenever ranks decide to take T steps, T is at least 1 and at most the number of samples "
        "of every rank that has samples, for any number of ranks. And the epoch finishes only "
        "when no rank wants a step (without a quota in quota mode: when some rank is drained); "
        "if steps still wait for their block then, these are emitted first. A "
        "rank that has to idle and has no sample to do it with is lent one."
    ),
    assumes=(
        "Reports as sound ranks post them: no more groups than samples, and a drained rank gives "
        "the window as its limit. The two facts about the tally (the exchange theorem)."
    ),
    reasoning=(
        "An arbitrary rank's report is bounded by the tally; the largest want and the smallest "
        "limit are those of some ranks. T is the smaller of the two."
    ),
    leaves_out="Nothing of the statement.",
    obligations=(
        *_in_every_mode(
            "T is in the envelope",
            "if the decision is T steps: 1 <= T <= samples of any rank that has samples",
            _envelope,
            {
                "T ignores the smallest sample count": _changed(target=lambda t: t.want),
                "T is one lower": _changed(target=lambda t: min(t.want, t.limit) - 1),
            },
        ),
        *_in_every_mode(
            "lending",
            "if a rank that has to idle has no sample for it, the one that keeps one lends it",
            _lends,
            {"nobody lends": _changed(decide=rules.never_lend)},
            modes=("join, idle pad", "quota mode with a quota"),  # in the others nobody pads
        ),
        *_in_every_mode(
            "an epoch finishes when it is done",
            "if the decision is Finish, no rank wants a step (or, without a quota, one is "
            "drained), and no step waits; if one does, the decision is Flush",
            _finish_means_done,
            {
                "an epoch ends at once": _changed(decide=_ends_at_once),
                "what waits is left out": _changed(decide=rules.never_flush),
            },
        ),
    ),
)
