"""Draws worlds for the simulation: what ranks hold, how they are configured, what may go wrong."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from random import Random

from model_check.profiles import MODE_NAMES
from spec.config import Budget, Config, CostRule, Idle, Mode
from spec.errors import ConfigError
from spec.system import initial_states
from spec.variants import Variant
from spec.world import Faults, State, Stop, World


@dataclass(frozen=True)
class SimulationOptions:
    """Within which bounds to draw, and for how long.

    ranks, budget: of every run. samples (on a rank in an epoch), window, queue, faults: at most.
    mode: one of `profiles.MODE_NAMES`; None draws one for each run.
    seconds, runs: when to stop, whichever comes first; at least one of them is needed.
    variant: a protocol that must fall, in place of the shipped one.
    """

    ranks: int = 8
    samples: int = 6
    window: int = 4
    budget: int = 8
    queue: int = 2
    mode: str | None = None
    seed: int = 0
    seconds: float | None = None
    runs: int | None = None
    faults: int = 1
    variant: Variant | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "samples", "window", "budget", "queue"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.faults < 0:
            raise ConfigError(f"faults must be at least 0, not {self.faults}")
        if self.mode is not None and self.mode not in MODE_NAMES:
            raise ConfigError(f"mode must be one of {', '.join(MODE_NAMES)}, not {self.mode!r}")
        if self.seconds is None and self.runs is None:
            raise ConfigError("a simulation has no end of its own: pass seconds or runs")

    def random(self, run: int) -> Random:
        """The random numbers of a run: the same whenever, wherever and after whatever it runs."""
        return Random(f"{self.seed}-{run}")


@dataclass(frozen=True)
class Setting:
    """A world, and the state in which its run begins."""

    world: World
    start: State


def draw_setting(options: SimulationOptions, rng: Random) -> Setting:
    """Draw a world within the bounds."""
    samples = rng.randint(1, options.samples)
    epochs, faults = rng.choice((1, 1, 1, 2)), _faults(options.faults, rng)
    stop = rng.choice((Stop.NEVER,) * 4 + (Stop.TOGETHER, Stop.ALONE))
    coupled = stop is not Stop.ALONE and rng.random() < 0.8
    world = World(
        config=_config(options, samples, rng),
        world_size=options.ranks,
        kinds=_kinds(options.budget, rng),
        samples=samples,
        queue=rng.randint(1, options.queue),
        epochs=epochs,
        coupled=coupled,
        stop=stop,
        faults=faults,
    )
    if options.variant is not None:
        world = options.variant.within(world)
    return Setting(world, _start(world, rng.randint(0, samples + 1)))


def _start(world: World, stop_after: int) -> State:
    starts = list(islice(initial_states(world), stop_after + 1))
    return starts[-1]  # where trainers never stop together there is only one


def _config(options: SimulationOptions, samples: int, rng: Random) -> Config:
    window = rng.randint(1, options.window)
    mode = options.mode or rng.choice(MODE_NAMES)
    quota = None
    if mode == "quota" and rng.random() < 0.7:
        quota = rng.randint(1, options.ranks * samples)
    budget = Budget(
        options.budget,
        rule=rng.choice((CostRule.PADDED, CostRule.SUMMED)),
        max_samples=rng.choice((None, None, rng.randint(1, 4))),
        multiple=rng.choice((1, 1, 2)),
    )
    return Config(
        budget,
        window,
        slow_start=rng.randint(1, window),
        mode=Mode.QUOTA if mode == "quota" else Mode.JOIN,
        idle=Idle.STOP if mode == "join-stop" else Idle.PAD,
        quota=quota,
        seed=rng.randrange(1000),
        accumulation_steps=1 if mode == "join-stop" else rng.choice((1, 1, 2, 3)),
    )


def _kinds(budget: int, rng: Random) -> tuple[tuple[int, int], ...]:
    """Short, long, oversize and empty samples, some without weight; short ones in any case."""
    shortest = max(1, budget // 4)
    kinds = [(rng.randint(1, shortest), 1)]
    for _ in range(rng.randint(0, 4)):
        cost = rng.choice(
            (0, rng.randint(1, shortest), rng.randint(1, budget), budget + rng.randint(1, budget))
        )
        kinds.append((cost, 0 if rng.random() < 0.1 else max(1, cost // 2)))
    return tuple(dict.fromkeys(kinds))


def _faults(most: int, rng: Random) -> Faults:
    if most == 0 or rng.random() < 0.4:
        return Faults()
    kinds = [rng.random() < 0.6 for _ in range(3)]
    kinds[rng.randrange(3)] = True
    return Faults(rng.randint(1, most), *kinds)
