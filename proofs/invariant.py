"""What is true of one rank between any two events: the invariant that the proofs of a rank's state
machine are inductions over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from model_check.prover import both, either, negation
from proofs.conduct import grouped_samples
from spec.config import Idle
from spec.quota import quota_met
from spec.rank import Input, Phase, RankState, Setup, Trainer, room_left


def sound(setup: Setup, state: RankState) -> Any:
    """The invariant: what is true of a rank between any two events."""
    config, phase = setup.config, state.phase
    always = both(
        within_window(setup, state),
        len(state.waiting) < config.accumulation_steps,
        state.trainer is not Trainer.RETIRED or _retires(setup, state),
        phase in (Phase.REPORTING, Phase.TOTALLING) or not state.groups,
        phase is Phase.EMITTING or not state.pending,
    )
    if phase is Phase.FILLING:
        asking = state.input is Input.OPEN and state.trainer is Trainer.SERVED
        met = quota_met(config, state.delivered)
        return both(always, asking, negation(met), room_left(setup, state) >= 1)
    if phase is Phase.REPORTING and state.groups:
        fits = len(state.groups) <= grouped_samples(state)
        met = quota_met(config, state.delivered)
        empty, works = len(state.window) == 0, state.input is not Input.FAILED
        return both(always, empty, fits, works, negation(met))
    if phase is Phase.REPORTING:
        drained = both(len(state.window) == 0, state.input is not Input.OPEN)
        cut_short = state.input is Input.FAILED or state.trainer is Trainer.STOPPED
        return both(always, either(drained, cut_short, quota_met(config, state.delivered)))
    if phase is Phase.TOTALLING:
        return both(always, len(state.groups) >= 1)
    if phase is Phase.EMITTING:
        served = state.trainer is Trainer.SERVED
        return both(always, bool(state.pending), served)
    return always


def within_window(setup: Setup, state: RankState) -> Any:
    """A rank that reads holds no more than the window, beside steps that wait for their block or
    are being emitted; and no round puts more into its steps."""
    window = setup.config.window
    reads = state.trainer is not Trainer.STOPPED and state.input is not Input.FAILED
    beside = len(state.window) + grouped_samples(state)
    grouped = grouped_samples(state) <= window
    return both(grouped, beside <= window if reads and state.phase is not Phase.ENDED else True)


def _retires(setup: Setup, state: RankState) -> bool:
    return state.input is not Input.OPEN and setup.config.idle is Idle.STOP


def occurrences(x: Any, groups: Iterable[Iterable[Any]]) -> int:
    """How often the sample is in the groups."""
    return sum(1 for group in groups for sample in group if sample is x)


def places(x: Any, state: RankState) -> int:
    """In how many places the rank holds the sample."""
    steps = [step.group for step in (*state.waiting, *state.pending)]
    return occurrences(x, (state.window, *state.groups, *steps))
