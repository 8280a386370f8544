"""A failure or an early stop on any rank ends the epoch on all of them, in the same round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from model_check.prover import Obligation, Source, both, implies
from proofs.agreement import MODES, Deciding
from proofs.reports import bounds, lifted, some_report_of_any_kind, some_tally
from proofs.theorem import Theorem
from spec import exchange
from spec.config import Config
from spec.exchange import Abort, Close, Decision, Mismatch, Tally

SHIPPED = Deciding(MODES["join, idle pad"])


class _Round:
    """An arbitrary rank's report and tally; the ranks that have the lowest failed and the lowest
    closed rank, or that nobody has failed or closed."""

    def __init__(self, source: Source) -> None:
        window, self.world_size = source.int("window"), source.int("W")
        source.assume(both(window >= 1, self.world_size >= 1))
        self.tally = some_tally(source, "tally")
        self.any, self.failing, self.closing = (
            some_report_of_any_kind(source, name, window) for name in ("any", "failing", "closing")
        )
        self.ranks = [source.int(f"rank of {name}") for name in ("any", "failing", "closing")]
        lifts = []
        for report, rank in zip((self.any, self.failing, self.closing), self.ranks, strict=True):
            source.assume(both(rank >= 0, rank < self.world_size))
            lifts.append(lifted(report, rank, self.world_size))
            source.assume(bounds(self.tally, lifts[-1]))
        source.assume(self.tally.failed_rank == lifts[1].failed_rank)
        source.assume(self.tally.closed_rank == lifts[2].closed_rank)

    def decision(self, f: Deciding) -> Decision:
        """What all ranks do."""
        return f.decide(f.config, self.world_size, self.tally, f.target(self.tally))


def _failure_aborts(source: Source, f: Deciding) -> Callable[[], Any]:
    round_ = _Round(source)

    def claim() -> Any:
        ends = isinstance(round_.decision(f), Abort | Mismatch)
        return implies(round_.any.failed, ends)

    return claim


def _abort_names(source: Source, f: Deciding) -> Callable[[], Any]:
    round_ = _Round(source)

    def claim() -> Any:
        decision = round_.decision(f)
        if not isinstance(decision, Abort):
            return True
        return both(round_.failing.failed, decision.rank == round_.ranks[1])

    return claim


def _stop_closes(source: Source, f: Deciding) -> Callable[[], Any]:
    round_ = _Round(source)

    def claim() -> Any:
        ends = isinstance(round_.decision(f), Close | Abort | Mismatch)
        return implies(round_.any.closed, ends)

    return claim


def _close_names(source: Source, f: Deciding) -> Callable[[], Any]:
    round_ = _Round(source)

    def claim() -> Any:
        decision = round_.decision(f)
        if not isinstance(decision, Close):
            return True
        return both(round_.closing.closed, decision.rank == round_.ranks[2])

    return claim


def _ignores_failure(config: Config, world_size: int, tally: Tally, target: int) -> Decision:
    return exchange.decide(config, world_size, tally._replace(failed_rank=world_size), target)


def _ignores_close(config: Config, world_size: int, tally: Tally, target: int) -> Decision:
    return exchange.decide(config, world_size, tally._replace(closed_rank=world_size), target)


def _names_the_next(config: Config, world_size: int, tally: Tally, target: int) -> Decision:
    decision = exchange.decide(config, world_size, tally, target)
    return type(decision)(decision.rank + 1) if isinstance(decision, Abort | Close) else decision


def _in_every_mode(name: str, says: str, body: Any, mutants: dict[str, Any]) -> list[Obligation]:
    return [
        Obligation(
            f"{name} ({mode})",
            says,
            body,
            replace(SHIPPED, config=config),
            {m: replace(SHIPPED, config=config, decide=decide) for m, decide in mutants.items()},
        )
        for mode, config in MODES.items()
    ]


THEOREM = Theorem(
    promise="uniform-abort",
    states=(
        "If the report of any of any number of ranks says that it has failed, every rank ends the "
        "epoch in that round and names a rank that has failed; if it says that its trainer has "
        "stopped, every rank ends the epoch in that round. Nobody ends it so for no reason."
    ),
    assumes="The two facts about the tally (the exchange theorem). Ranks decide alike (agreement).",
    reasoning=(
        "A failed rank's number bounds the tally's from above, so the tally has one below the "
        "world size and the decision is Abort, unless ranks do not match. The tally's number is "
        "that of some rank that has failed. The same for stops. The rounds before were decided "
        "alike, so the epoch ends before the same step on all ranks. A rank reports, and so ends, "
        "only when every step decided on before is emitted (part of identity-coverage)."
    ),
    leaves_out=(
        "That a queue keeps its order and hands over its steps before the error, and what happens "
        "where a process dies: explored by `odb verify`, tested on real ranks."
    ),
    obligations=(
        *_in_every_mode(
            "a failure aborts",
            "if a rank has failed, the decision is Abort (or Mismatch)",
            _failure_aborts,
            {"failures are ignored": _ignores_failure},
        ),
        *_in_every_mode(
            "an abort names a rank that failed",
            "if the decision is Abort, it names a rank whose report says that it has failed",
            _abort_names,
            {"the next rank is named": _names_the_next},
        ),
        *_in_every_mode(
            "a stop closes",
            "if a trainer has stopped, the decision is Close (or Abort or Mismatch)",
            _stop_closes,
            {"stops are ignored": _ignores_close},
        ),
        *_in_every_mode(
            "a close names a rank that stopped",
            "if the decision is Close, it names a rank whose report says that its trainer stopped",
            _close_names,
            {"the next rank is named": _names_the_next},
        ),
    ),
)
