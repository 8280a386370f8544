"""What a rank waits for in a round is at least one sample and at most the window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model_check.prover import Obligation, Source, both, either, implies
from proofs.theorem import Theorem
from spec import config as settings
from spec.config import MOST_DOUBLINGS, Config


@dataclass(frozen=True)
class Filling:
    """The function that this theorem is about, in one round."""

    round: int = 0
    fill_target: Callable[[Config, int], int] = settings.fill_target


class _SomeConfig:
    """A configuration with a window and a slow start of any size that fits the wire."""

    def __init__(self, source: Source) -> None:
        self.window, self.slow_start = source.int("window"), source.int("slow_start")
        for value in (self.window, self.slow_start):
            source.assume(both(value >= 1, value < settings.WIRE_LIMIT))


def _within(source: Source, f: Filling) -> Callable[[], Any]:
    config: Any = _SomeConfig(source)
    held, arriving = source.int("held"), source.int("arriving")
    source.assume(both(held >= 0, arriving >= 1))

    def claim() -> Any:
        target = f.fill_target(config, f.round)
        asked_for = arriving <= target - held  # what `check` accepts
        return both(target >= 1, implies(asked_for, held + arriving <= config.window))

    return claim


def _grows(source: Source, f: Filling) -> Callable[[], Any]:
    config: Any = _SomeConfig(source)

    def claim() -> Any:
        now, later = f.fill_target(config, f.round), f.fill_target(config, f.round + 1)
        return both(now <= later, either(now == config.window, later > now))

    return claim


def _reached(source: Source, f: Filling) -> Callable[[], Any]:
    config: Any = _SomeConfig(source)
    return lambda: f.fill_target(config, f.round) == config.window


def _one_more(config: Config, round_: int) -> int:
    return settings.fill_target(config, round_) + 1


def _never_grows(config: Config, round_: int) -> int:
    return min(config.window, config.slow_start)


def _in_every_round(name: str, says: str, body: Any, mutant: Any) -> list[Obligation]:
    return [
        Obligation(f"{name} (round {r})", says, body, Filling(r), {"changed": Filling(r, mutant)})
        for r in range(MOST_DOUBLINGS)
    ]


THEOREM = Theorem(
    promise="bounded-memory",
    states=(
        "In every round a rank waits for at least one sample and never holds more than the "
        "window, for any window and any slow start (and, beside it, the samples of fewer steps "
        "than a block has, which wait for their block: each was in the window of its round). What "
        "it waits for grows from round to round until it is the window."
    ),
    assumes=(
        "Windows and slow starts that fit the wire. Samples enter by `Arrived` alone, and `check` "
        "refuses more of them than the room that is left."
    ),
    reasoning=(
        "`_fill` asks for what is missing up to `fill_target`, and no more may arrive; that every "
        "other event only takes samples out is part of identity-coverage. From round "
        f"{MOST_DOUBLINGS} on the target is the window, so that later rounds are like that one."
    ),
    leaves_out=(
        "What a loader holds outside of the protocol: the steps in its queue, a chunk that is "
        "being taken apart, the chunks that workers have ready, and one spare."
    ),
    obligations=(
        *_in_every_round(
            "within the window",
            "what is held and what may arrive are no more than the window",
            _within,
            _one_more,
        ),
        *_in_every_round("grows", "the target grows until it is the window", _grows, _never_grows),
        Obligation(
            "reached",
            "in the end the target is the window",
            _reached,
            Filling(MOST_DOUBLINGS),
            {"never grows": Filling(MOST_DOUBLINGS, _never_grows)},
        ),
    ),
)
