"""No sample waits for ever: with every round it is nearer to the oldest, and the oldest leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from model_check.abstract import some_samples
from model_check.prover import OUTSIDE, Obligation, Source, both
from proofs.machine import between
from proofs.partition import SHAPES, Moves, as_groups, some_samples_of
from proofs.theorem import Theorem
from spec import rank
from spec.config import Place
from spec.errors import IllegalEventError
from spec.messages import Arrived, Event
from spec.rank import Phase, RankState, Rules, Setup
from spec.samples import Sample
from spec.variants import rules


@dataclass(frozen=True)
class Entering:
    """The function that lets samples in."""

    check: Callable[[Setup, RankState, Event], None] = rank.check


def _age_falls(source: Source, f: Moves) -> Callable[[], Any]:
    samples = some_samples_of(source, sum(f.sizes))
    groups = as_groups(samples, f.sizes)

    def claim() -> Any:
        carried = f.align(groups, f.target).carried
        return both(*(_older(s, carried) < _older(s, samples) for s in carried))

    return claim


def _older(sample: Sample, among: tuple[Sample, ...]) -> Any:
    """How many samples arrived before it."""
    return sum(int(other.seq < sample.seq) for other in among if other is not sample)


def _enters_behind(source: Source, f: Entering) -> Callable[[], Any]:
    arrived, waiting = source.int("arrived so far"), source.int("waiting")
    window, fill, seq = source.int("window"), source.int("fill target"), source.int("seq")
    oldest = source.int("seq of one that waits")
    source.assume(both(waiting >= 0, waiting <= arrived, window >= 1, oldest < arrived))

    def claim() -> Any:
        config: Any = SimpleNamespace(window=window)
        fills = Rules(fill_target=lambda config, round_: between(1, fill, config.window))
        state = RankState(
            Phase.FILLING, Place(0, 0, 0), window=some_samples(waiting), arrived=arrived
        )
        try:
            f.check(Setup(config, 0, 1, fills), state, Arrived((Sample(seq, 1, 1),)))
        except IllegalEventError:
            return OUTSIDE
        return both(oldest < seq, waiting + 1 <= window)

    return claim


def _bound(source: Source, f: Moves) -> Callable[[], Any]:
    """`waited` rounds so far, `older` samples still in front of x; one round more."""
    window, waited, older = (source.int(name) for name in ("window", "waited", "older"))
    samples = some_samples_of(source, 3)
    old, x, young = samples
    source.assume(both(old.seq < x.seq, x.seq < young.seq))
    source.assume(both(waited >= 0, older >= 1, waited + older + 1 <= window))

    def claim() -> Any:
        carried = f.align(as_groups(samples, (1, 1, 1)), 1).carried
        if not any(s is x for s in carried):
            return True
        fewer = older - (_older(x, samples) - _older(x, carried))
        return waited + 1 + fewer + 1 <= window

    return claim


def _lets_anything_in(setup: Setup, state: RankState, event: Event) -> None:
    """Nothing is looked at."""


def _carrying() -> Iterator[Obligation]:
    for sizes in SHAPES:
        for target in range(1, len(sizes)):
            about = Moves(sizes, target)
            yield Obligation(
                f"age falls (groups of {', '.join(map(str, sizes))} to {target})",
                "each sample that is carried has fewer older ones in front of it than before",
                _age_falls,
                about,
                {"the oldest wait": replace(about, align=rules.carry_oldest)},
            )


THREE = Moves((1, 1, 1), 1)

THEOREM = Theorem(
    promise="bounded-delay",
    states=(
        "A sample leaves the window within as many rounds as there were samples in it when it had "
        "entered, itself included: within `window` rounds at most. (Its step then waits for its "
        "block, for which each round decides on one step at least.)"
    ),
    assumes=(
        "Rounds in which the rank takes steps. (A round without is the last of its epoch.) Steps "
        "that are taken back (a quota, a stop, a failure) are followed by the epoch's end."
    ),
    reasoning=(
        "The age of a sample is the number of older ones in the window. It enters with an age "
        "below the window's size, behind all that wait. In each round the oldest sample leaves "
        "(partition), so the age of every sample that is carried falls by one at least; nothing "
        "ever arrives in front of it. Rounds waited plus age never grow, so at age 0, after "
        "`window` - 1 rounds at most, it is the oldest and leaves."
    ),
    leaves_out=(
        "Carries of more than three groups, by the solver: a carry keeps groups by the age of "
        "their oldest sample, however many they are."
    ),
    obligations=(
        *_carrying(),
        Obligation(
            "enters behind",
            "a sample that is let in is younger than any that waits, and fits into the window",
            _enters_behind,
            Entering(),
            {"anything is let in": Entering(_lets_anything_in)},
        ),
        Obligation(
            "bound, induction step",
            "rounds waited plus samples in front never grow",
            _bound,
            THREE,
            {"the oldest wait": replace(THREE, align=rules.carry_oldest)},
        ),
    ),
)
