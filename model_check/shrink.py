"""Makes a run that breaks a promise short: fewer ranks, smaller worlds, fewer actions.

This is delta debugging (Zeller and Hildebrandt, 2002). A candidate is played: of its actions those
that are not enabled when their turn comes are skipped, and what is left to do after the last one is
done in a fixed order. It is taken if it breaks the same promise and is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from model_check.explorer import Broken
from model_check.live import Live
from spec.errors import ConfigError
from spec.system import initial_states
from spec.world import Action, Crash, Deliver, Exchange, Faults, Gradient, State, Stop, World

TRIES = 4000
"""Most candidates to play. Counted, not timed: a failure shrinks to the same run anywhere."""


@dataclass(frozen=True)
class Script:
    """A run to play: a world, the step after which trainers stop (if they do), and actions."""

    world: World
    stop_after: int | None
    actions: tuple[Action, ...]

    def start(self) -> State:
        """The state in which it begins. (A smaller world may not have as many steps.)"""
        starts = list(initial_states(self.world))
        return next((s for s in starts if s.stop_after == self.stop_after), starts[-1])

    def play(self, promise: str | None = None, keep_history: bool = False) -> Live:
        """Play it to the first broken promise, or to the end. If it is to break the promise to end,
        it is over when it comes back to a state in which it was."""
        live = Live(self.world, self.start(), keep_history)
        been = {live.state} if promise == ENDS else None
        following = iter(self.actions)
        while live.broken is None:
            action = next((a for a in following if live.enabled(a)), None) or _by_itself(live)
            if action is None:
                live.conclude()
                break
            live.perform(action)
            if been is not None and live.broken is None:
                if live.state in been:
                    live.broken = Broken(ENDS, "the system can go round in a circle for ever")
                been.add(live.state)
        return live


ENDS = "bounded-termination"


def _by_itself(live: Live) -> Action | None:
    """What happens next if nobody chooses: inputs end, the lowest rank acts first."""
    if live.ready:
        rank = min(live.ready)
        return min(live.usual(rank), key=lambda action: isinstance(action, Deliver))
    return next(iter(live.meetings()), None)


def shrink(script: Script, promise: str) -> Script:
    """A script that breaks the same promise and that none of the ways below makes smaller."""
    search = _Shrinking(script, promise)
    before = None
    while before != search.best and search.tries < TRIES:
        before = search.best
        for way in (fewer_ranks, smaller_worlds, essentials, fewer_actions):
            way(search)
    return search.best


@dataclass
class _Shrinking:
    """The smallest script so far, and how many candidates were played."""

    best: Script
    promise: str
    tries: int = 0
    seen: set[Script] = field(default_factory=set)

    def try_(self, candidate: Script) -> bool:
        """Play a candidate, and keep it if it breaks the promise and is smaller."""
        if candidate in self.seen or self.tries >= TRIES:
            return False
        self.seen.add(candidate)
        self.tries += 1
        live = candidate.play(self.promise)
        if live.broken is None or live.broken.promise != self.promise:
            return False
        played = replace(candidate, actions=tuple(live.performed))
        if _size(played) >= _size(self.best):
            return False
        self.best = played
        return True


def _size(script: Script) -> tuple[int, ...]:
    """What is compared: first ranks, then actions, then how large the world is."""
    world, settings = script.world, script.world.config
    return (
        world.world_size,
        len(script.actions),
        world.epochs + world.faults.most + (world.stop is not Stop.NEVER),
        world.samples + world.queue + settings.window + settings.slow_start,
        (settings.quota or 0) + len(world.kinds) + settings.seed,
        sum(cost + weight for cost, weight in world.kinds),
    )


def _without(items: Sequence[int], keep: Callable[[Sequence[int]], bool]) -> None:
    """Take ever smaller parts out of a list, as long as `keep` likes what remains."""
    size = max(1, len(items) // 2)
    while items:
        at = 0
        while at < len(items):
            rest = [*items[:at], *items[at + size :]]
            if keep(rest):
                items = rest
            else:
                at += size
        if size == 1:
            return
        size = max(1, min(size // 2, len(items) // 2))


# ---------------------------------------------------------------- ways to make a script smaller


def fewer_ranks(search: _Shrinking) -> None:
    """Leave out ranks, with all that they do."""
    script = search.best

    def keep(ranks: Sequence[int]) -> bool:
        return bool(ranks) and search.try_(_of_ranks(script, ranks))

    _without(range(script.world.world_size), keep)


def _of_ranks(script: Script, ranks: Sequence[int]) -> Script:
    names = {old: new for new, old in enumerate(ranks)}
    actions: list[Action] = []
    for action in script.actions:
        if isinstance(action, Exchange | Gradient):
            actions.append(action)
        elif action.rank in names:
            actions.append(replace(action, rank=names[action.rank]))
    return Script(replace(script.world, world_size=len(ranks)), script.stop_after, tuple(actions))


def smaller_worlds(search: _Shrinking) -> None:
    """Try every world that is smaller in one way."""
    for candidate in _smaller(search.best):
        search.try_(candidate)


def _smaller(script: Script) -> Iterator[Script]:
    world, settings = script.world, script.world.config
    changes: list[dict[str, Any]] = [{"epochs": 1}, {"faults": Faults()}, {"queue": 1}]
    changes += [{"faults": replace(world.faults, most=n)} for n in range(1, world.faults.most)]
    changes += [{"samples": n} for n in range(1, world.samples)]
    configs: list[dict[str, Any]] = [{"seed": 0}, {"slow_start": settings.window}]
    configs += [{"budget": replace(settings.budget, max_samples=None)}]
    configs += [{"budget": replace(settings.budget, multiple=1)}]
    configs += [{"window": n, "slow_start": n} for n in range(1, settings.window)]
    configs += [{"quota": n} for n in range(1, min(32, settings.quota or 0))]
    for change in changes:
        yield from _changed(script, change)
    for change in configs:
        try:
            yield from _changed(script, {"config": replace(settings, **change)})
        except ConfigError:
            continue
    if world.stop is not Stop.NEVER:
        yield replace(script, world=replace(world, stop=Stop.NEVER), stop_after=None)
        yield from (replace(script, stop_after=n) for n in range(script.stop_after or 0))
    yield from _simpler_samples(script)


def _changed(script: Script, change: dict[str, Any]) -> Iterator[Script]:
    world = replace(script.world, **change)
    if world != script.world:
        yield replace(script, world=world)


def _simpler_samples(script: Script) -> Iterator[Script]:
    """Replace each kind of sample by each other, and by one that costs less."""
    kinds = script.world.kinds
    for old in kinds:
        others = [kind for kind in kinds if kind != old]
        lighter = [(cost, min(old[1], max(1, cost))) for cost in range(1, old[0])]
        for new in [*others, *lighter]:
            yield replace(
                script,
                world=replace(
                    script.world, kinds=tuple(dict.fromkeys(new if k == old else k for k in kinds))
                ),
                actions=tuple(_recast(action, old, new) for action in script.actions),
            )


def _recast(action: Action, old: tuple[int, int], new: tuple[int, int]) -> Action:
    if isinstance(action, Deliver) and (action.cost, action.weight) == old:
        return Deliver(action.rank, *new)
    return action


def essentials(search: _Shrinking) -> None:
    """Keep what ranks are given and what goes wrong; let the rest happen by itself."""
    script = search.best
    given = tuple(a for a in script.actions if isinstance(a, Deliver | Crash))
    search.try_(replace(script, actions=given))


def fewer_actions(search: _Shrinking) -> None:
    """Leave out actions; what has to happen nevertheless then happens by itself."""
    actions = search.best.actions

    def keep(numbers: Sequence[int]) -> bool:
        return search.try_(replace(search.best, actions=tuple(actions[n] for n in numbers)))

    _without(range(len(actions)), keep)
