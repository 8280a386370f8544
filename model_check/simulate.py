"""Runs the closed system at random, for sizes that exhaustion cannot reach.

Worlds, schedules and faults are drawn from the seed and the number of the run alone, so that a run
that breaks a promise can be replayed; it is then shrunk to a short one. That nothing was found
proves nothing, and the result never says so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from model_check.explorer import Verdict, Violation
from model_check.goals import GOALS
from model_check.live import Live
from model_check.random_worlds import Setting, SimulationOptions, draw_setting
from model_check.schedulers import Policy, Scheduler
from model_check.shrink import Script, shrink
from spec.world import Action, State, World

__all__ = ["SimulatedFailure", "SimulationOptions", "SimulationResult", "replay", "simulate"]
"""`SimulationOptions` is at home in `model_check.random_worlds`."""


@dataclass(frozen=True)
class PlayedRun:
    """One random run, as it was: its world and beginning, what happened, and what came of it.
    `promise` and `text` are None if every promise was kept."""

    run: int
    setting: Setting
    policy: Policy
    actions: tuple[Action, ...]
    goals: frozenset[str]
    promise: str | None
    text: str | None


@dataclass(frozen=True)
class SimulatedFailure:
    """A run that broke a promise, and what is left of it after shrinking.

    run, seed: what replays it. world: the one it was shrunk to. violation: the shrunk run, whose
    states and actions are whole (see `explorer.Violation`). length_before: its actions as found.
    """

    run: int
    seed: int
    world: World
    violation: Violation[State, Action]
    length_before: int

    @property
    def promise(self) -> str:
        """The promise that fell: the same in the run as found and as shrunk."""
        return self.violation.promise

    @property
    def text(self) -> str:
        """How it fell, in the shrunk run."""
        return self.violation.text

    @property
    def length(self) -> int:
        """How many actions the shrunk run has."""
        return len(self.violation.actions)


@dataclass(frozen=True)
class SimulationResult:
    """What a simulation covered and found. `goals`: in how many runs each was reached."""

    options: SimulationOptions
    runs: int
    actions: int
    longest_run: int
    seconds: float
    goals: Mapping[str, int]
    failure: SimulatedFailure | None

    @property
    def verdict(self) -> Verdict:
        """REFUTED or UNKNOWN: what was not tried may still fail."""
        return Verdict.UNKNOWN if self.failure is None else Verdict.REFUTED

    @property
    def unmet(self) -> list[str]:
        """The goals that no run reached."""
        return [name for name, count in self.goals.items() if count == 0]

    def __str__(self) -> str:
        covered = (
            f"{self.runs:,} random runs of {self.options.ranks} ranks, {self.actions:,} actions "
            f"(at most {self.longest_run:,} in a run, {self._rate:,.0f} a second)"
        )
        if self.failure is not None:
            found = self.failure
            return (
                f"REFUTED: run {found.run} of seed {found.seed} broke {found.promise} "
                f"({found.text}); {found.length_before:,} actions, shrunk to {found.length} of "
                f"{found.world.world_size} ranks; {covered}"
            )
        missed = f", all but {', '.join(self.unmet)}" if self.unmet else ""
        return (
            f"UNKNOWN: no promise broken in {covered}; {len(self.goals) - len(self.unmet)} of "
            f"{len(self.goals)} goals reached{missed}. These runs are a sample, not all there are."
        )

    @property
    def _rate(self) -> float:
        return self.actions / self.seconds if self.seconds else 0.0


def simulate(
    options: SimulationOptions, progress: Callable[[int, int], None] | None = None
) -> SimulationResult:
    """Run until the time or the runs are up, or a promise is broken.

    `progress(runs, actions)` is called after each run.
    """
    began = time.perf_counter()
    runs = actions = longest = 0
    goals: Counter[str] = Counter()
    broken: PlayedRun | None = None
    while broken is None and not _is_up(options, runs, time.perf_counter() - began):
        played = replay(options, runs)
        runs += 1
        actions += len(played.actions)
        longest = max(longest, len(played.actions))
        goals.update(played.goals)
        if progress is not None:
            progress(runs, actions)
        if played.promise is not None:
            broken = played
    seconds = time.perf_counter() - began
    return SimulationResult(
        options=options,
        runs=runs,
        actions=actions,
        longest_run=longest,
        seconds=seconds,
        goals={name: goals[name] for name in GOALS},
        failure=None if broken is None else failure_of(options, broken),
    )


def replay(options: SimulationOptions, run: int) -> PlayedRun:
    """Play the run of this number, as `simulate` does."""
    rng = options.random(run)
    setting = draw_setting(options, rng)
    live = Live(setting.world, setting.start)
    scheduler = Scheduler(live, rng)
    while live.broken is None:
        action = scheduler.choose()
        if action is None:
            live.conclude()
            break
        live.perform(action)
    promise, text = live.broken or (None, None)
    return PlayedRun(
        run=run,
        setting=setting,
        policy=scheduler.policy,
        actions=tuple(live.performed),
        goals=frozenset(live.goals),
        promise=promise,
        text=text,
    )


def failure_of(options: SimulationOptions, played: PlayedRun) -> SimulatedFailure:
    """Shrink a run that broke a promise."""
    assert played.promise is not None
    world, start = played.setting.world, played.setting.start
    script = Script(world, start.stop_after, played.actions)
    small = shrink(script, played.promise)
    live = small.play(played.promise, keep_history=True)
    assert live.broken is not None
    assert live.history is not None
    states = tuple(live.history)
    again = states.index(states[-1])
    violation = Violation(
        *live.broken, states, tuple(live.performed), again if again < len(states) - 1 else None
    )
    return SimulatedFailure(played.run, options.seed, small.world, violation, len(played.actions))


def _is_up(options: SimulationOptions, runs: int, seconds: float) -> bool:
    over_time = options.seconds is not None and seconds >= options.seconds
    return over_time or (options.runs is not None and runs >= options.runs)
