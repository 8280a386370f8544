"""Which worlds are explored: what exactly a verification covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from model_check.closed import Reduction
from spec.config import Budget, Config, Idle, Mode
from spec.world import Faults, Stop, World

BUDGET = Budget(3)
SHORT, LONG, OVERSIZE, EMPTY = (1, 1), (2, 2), (5, 5), (0, 0)
"""Kinds of samples, as (cost, weight): three short ones fit the budget, two long ones do not, the
oversize one does not by itself, the empty one is filtered."""


NONE = Reduction()
BOTH = Reduction(symmetry=True, ample=True)


@dataclass(frozen=True)
class Case:
    """One world to explore, and how."""

    name: str
    world: World
    reduction: Reduction = NONE


def config(window: int = 2, slow_start: int = 2, **settings: object) -> Config:
    """A small configuration."""
    return Config(BUDGET, window, slow_start=slow_start, **settings)  # type: ignore[arg-type]


JOIN_PAD = config()
JOIN_STOP = config(idle=Idle.STOP)
NO_QUOTA = config(mode=Mode.QUOTA)
QUOTA = config(mode=Mode.QUOTA, quota=2)

MODES: Sequence[tuple[str, Config]] = (
    ("join, idle pad", JOIN_PAD),
    ("join, idle stop", JOIN_STOP),
    ("quota mode, no quota", NO_QUOTA),
    ("quota mode, quota 2", QUOTA),
)

BLOCKS: Sequence[tuple[str, Config]] = (
    ("blocks of 2", config(accumulation_steps=2)),
    ("blocks of 2, window 1", config(window=1, accumulation_steps=2)),
    ("blocks of 2, no quota", config(mode=Mode.QUOTA, accumulation_steps=2)),
    ("blocks of 2, quota 2", config(mode=Mode.QUOTA, quota=2, accumulation_steps=2)),
    ("blocks of 3", config(window=1, accumulation_steps=3)),
)
"""Gradients are added up over several steps. (With idle stop they cannot be.)"""


def quick() -> list[Case]:
    """Two ranks exhaustively with faults, three without; every mode; queues of one step, so that
    rounds have more steps than a queue holds. Nothing is reduced with two ranks."""
    cases = []
    for name, settings in MODES:
        kinds = (SHORT, LONG, OVERSIZE, EMPTY)
        cases.append(Case(f"{name}: 4 kinds", World(settings, 2, kinds, 2)))
        faulty = World(settings, 2, (SHORT, OVERSIZE), 2, faults=Faults(2))
        cases.append(Case(f"{name}: 2 faults", faulty))
        again = World(settings, 2, (SHORT, LONG), 2, epochs=2, stop=Stop.TOGETHER)
        cases.append(Case(f"{name}: stops, 2 epochs", again, BOTH))
        alone = World(settings, 2, (SHORT, LONG), 2, coupled=False, stop=Stop.ALONE)
        cases.append(Case(f"{name}: one stops", alone))
        left = World(settings, 2, (LONG,), 2, epochs=2, faults=Faults(1))
        cases.append(Case(f"{name}: 1 fault, 2 epochs", left, BOTH))
        both = replace(left, samples=1, coupled=False, stop=Stop.ALONE)
        cases.append(Case(f"{name}: one stops, 1 fault, 2 epochs", both))
        three = World(settings, 3, (SHORT, LONG, OVERSIZE), 2)
        cases.append(Case(f"{name}: 3 ranks", three, BOTH))
    for name, settings in MODES:
        lone = World(settings, 1, (SHORT, LONG, EMPTY), 3, faults=Faults(2))
        cases.append(Case(f"{name}: 1 rank, 2 faults", lone))
    for name, settings in BLOCKS:
        cases.append(Case(name, World(settings, 2, (SHORT, LONG), 3)))
        faulty = World(settings, 2, (LONG,), 3, faults=Faults(2))
        cases.append(Case(f"{name}: 2 faults", faulty, BOTH))
        again = World(settings, 2, (LONG,), 3, epochs=2, stop=Stop.TOGETHER)
        cases.append(Case(f"{name}: stops, 2 epochs", again, BOTH))
        alone = World(settings, 2, (SHORT, LONG), 2, coupled=False, stop=Stop.ALONE)
        cases.append(Case(f"{name}: one stops", alone))
    growing = config(window=3, slow_start=1)
    cases.append(Case("slow start: window 3", World(growing, 2, (SHORT, LONG), 3, queue=2)))
    cases.append(Case("3 samples: window 2", World(JOIN_PAD, 2, (LONG, OVERSIZE), 3)))
    single = config(window=1)
    cases.append(Case("window 1: one sample each", World(single, 2, (SHORT, OVERSIZE), 2)))
    return cases


def glance() -> list[Case]:
    """A few small worlds, explored in a second: every mode, and a fault."""
    cases = [Case(name, World(settings, 2, (SHORT, LONG), 2)) for name, settings in MODES]
    faulty = World(JOIN_PAD, 2, (SHORT, LONG), 2, faults=Faults(1))
    return [*cases, Case("join, idle pad: 1 fault", faulty)]


def for_mutants() -> list[Case]:
    """Small worlds in which a variant falls fast, by a run that is short and easy to read. Nothing
    is reduced, so that ranks have their names."""
    cases = []
    for name, settings in MODES:
        cases.append(Case(name, World(settings, 2, (SHORT, LONG), 2)))
    # Inputs that end before the window is full, so that a rank knows it when it reports.
    roomy = World(config(window=3, slow_start=3), 2, (SHORT, LONG), 2)
    cases.insert(1, Case("join, idle pad: window 3", roomy))
    for name, settings in MODES:
        several = World(settings, 2, (SHORT, OVERSIZE, EMPTY), 2)
        cases.append(Case(f"{name}: oversize and empty samples", several))
        faulty = World(settings, 2, (SHORT, LONG), 2, faults=Faults(1))
        cases.append(Case(f"{name}: 1 fault", faulty))
        again = World(settings, 2, (LONG,), 2, epochs=2, stop=Stop.TOGETHER)
        cases.append(Case(f"{name}: stops, 2 epochs", again))
    cases.append(Case("window 2, 3 samples", World(JOIN_PAD, 2, (LONG, OVERSIZE), 3)))
    cases.append(Case("window 1", World(config(window=1), 2, (SHORT, LONG), 2)))
    for name, settings in BLOCKS:
        cases.append(Case(name, World(settings, 2, (LONG,), 3)))
    return cases


def full() -> list[Case]:
    """The quick profile, and three ranks with two faults, four and five without, larger shards."""
    cases = quick()
    for name, settings in MODES:
        faulty = World(settings, 3, (SHORT, LONG), 2, faults=Faults(2))
        cases.append(Case(f"{name}: 3 ranks, 2 faults", faulty, BOTH))
        again = World(settings, 3, (LONG,), 2, epochs=2, stop=Stop.TOGETHER)
        cases.append(Case(f"{name}: 3 ranks, stops, 2 epochs", again, BOTH))
        four = World(settings, 4, (SHORT, LONG, OVERSIZE), 2)
        cases.append(Case(f"{name}: 4 ranks", four, BOTH))
        cases.append(Case(f"{name}: 5 ranks", World(settings, 5, (SHORT, LONG), 2), BOTH))
        more = World(settings, 3, (SHORT, LONG), 3)
        cases.append(Case(f"{name}: 3 ranks, 3 samples", more, BOTH))
        longer = World(settings, 2, (SHORT, LONG, OVERSIZE), 3, queue=2)
        cases.append(Case(f"{name}: 3 samples, queue 2", longer))
    for name, settings in BLOCKS:
        three = World(settings, 3, (SHORT, LONG), 2)
        cases.append(Case(f"{name}: 3 ranks", three, BOTH))
        faulty = World(settings, 2, (SHORT, LONG), 3, faults=Faults(2))
        cases.append(Case(f"{name}: 2 kinds, 2 faults", faulty, BOTH))
        longer = World(settings, 2, (SHORT, LONG), 4, queue=2)
        cases.append(Case(f"{name}: 4 samples, queue 2", longer, BOTH))
    return cases


PROFILES = {"quick": quick, "full": full}
"""The profiles of `odb verify`. Each has to reach every goal of `model_check.goals`."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of a user's own choice, for `custom`. costs: one kind of sample each."""

    ranks: int = 2
    samples: int = 2
    window: int = 2
    budget: int = 3
    queue: int = 1
    costs: tuple[int, ...] = (1, 2, 5)
    quota: int | None = None
    faults: int = 0


MODE_NAMES = ("join-pad", "join-stop", "quota")


def mode_of(case: Case) -> str:
    """The name of a case's mode, one of `MODE_NAMES`."""
    config_ = case.world.config
    if config_.mode is Mode.QUOTA:
        return "quota"
    return "join-stop" if config_.idle is Idle.STOP else "join-pad"


def custom(bounds: Bounds, modes: Sequence[str]) -> list[Case]:
    """One world for each mode, within a user's bounds. Two ranks without faults are not reduced."""
    reduction = BOTH if bounds.ranks > 2 else NONE
    cases = []
    for mode in modes:
        quota = bounds.quota if mode == "quota" else None
        settings = Config(
            Budget(bounds.budget),
            bounds.window,
            slow_start=bounds.window,
            mode=Mode.QUOTA if mode == "quota" else Mode.JOIN,
            idle=Idle.STOP if mode == "join-stop" else Idle.PAD,
            quota=quota,
        )
        kinds = tuple((cost, cost) for cost in bounds.costs)
        world = World(settings, bounds.ranks, kinds, bounds.samples, bounds.queue)
        faulty = replace(world, faults=Faults(bounds.faults))
        cases.append(Case(mode if quota is None else f"{mode} {quota}", faulty, reduction))
    return cases
