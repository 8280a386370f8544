"""Runs a verification: explores cases, collects verdicts and coverage, and words the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context

from model_check.closed import ClosedSystem, Key
from model_check.end_promises import END_PROMISES
from model_check.explorer import Exploration, Limits, Verdict, Violation, explore
from model_check.node_promises import NODE_PROMISES
from model_check.profiles import NONE, Case
from spec.world import Action


@dataclass(frozen=True)
class CaseResult:
    """What exploring a case covered and found. `goals`: those reached in it."""

    case: Case
    system: ClosedSystem
    exploration: Exploration[Key, Action]
    goals: frozenset[str]

    @property
    def verdict(self) -> Verdict:
        """Of this case alone, goals aside: these are asked of all cases together."""
        return self.exploration.verdict


@dataclass
class VerificationResult:
    """Every case's result, and the goals that the cases together had to reach."""

    cases: list[CaseResult] = field(default_factory=list)
    wanted: frozenset[str] = frozenset()
    seconds: float = 0.0

    @property
    def unmet(self) -> list[str]:
        """Goals that nothing reached."""
        reached: set[str] = set().union(*(result.goals for result in self.cases))
        return sorted(self.wanted - reached)

    @property
    def verdict(self) -> Verdict:
        """HOLDS only if every case was exhausted and held, and every goal was reached."""
        verdicts = {result.verdict for result in self.cases}
        if Verdict.REFUTED in verdicts:
            return Verdict.REFUTED
        if Verdict.UNKNOWN in verdicts or not self.cases:
            return Verdict.UNKNOWN
        return Verdict.REFUTED if self.unmet else Verdict.HOLDS

    @property
    def broken(self) -> list[CaseResult]:
        """The cases that broke a promise."""
        return [result for result in self.cases if result.verdict is Verdict.REFUTED]

    @property
    def states(self) -> int:
        """Distinct states of all cases."""
        return sum(result.exploration.states for result in self.cases)

    @property
    def transitions(self) -> int:
        """Transitions of all cases."""
        return sum(result.exploration.transitions for result in self.cases)


@dataclass(frozen=True)
class Watcher:
    """Whom to tell how it goes: `case(number, of, name)` before each case, `states(count, depth)`
    now and then."""

    case: Callable[[int, int, str], None] = lambda number, of, name: None
    states: Callable[[int, int], None] = lambda count, depth: None


def verify(
    cases: Sequence[Case],
    wanted: frozenset[str] = frozenset(),
    limits: Limits | None = None,
    watcher: Watcher | None = None,
) -> VerificationResult:
    """Explore every case, all of them even if one is refuted.

    wanted: the goals that the cases together have to reach. limits: for each case.
    """
    watcher = watcher or Watcher()
    began = time.perf_counter()
    result = VerificationResult(wanted=wanted)
    for number, case in enumerate(cases):
        watcher.case(number, len(cases), case.name)
        result.cases.append(explore_case(case, limits or Limits(), watcher))
    result.seconds = time.perf_counter() - began
    return result


def verify_in_parallel(
    cases: Sequence[Case],
    wanted: frozenset[str],
    limits: Limits,
    watcher: Watcher,
    jobs: int,
) -> VerificationResult:
    """The same with one process for each of `jobs` cases at a time, the largest first.

    Worth it for many or large cases: starting a process takes seconds.
    """
    began = time.perf_counter()
    done: dict[int, CaseResult] = {}
    largest_first = sorted(range(len(cases)), key=lambda i: -_weight(cases[i]))
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        running = {pool.submit(_outcome, cases[i], limits): i for i in largest_first}
        for future in as_completed(running):
            number = running[future]
            watcher.case(len(done), len(cases), cases[number].name)
            found, goals = future.result()
            if found.verdict is Verdict.REFUTED:
                # Once more here, as a run can be told only beside the system that it is a run of.
                done[number] = explore_case(cases[number], limits, watcher)
            else:
                system = ClosedSystem(cases[number].world, cases[number].reduction)
                done[number] = CaseResult(cases[number], system, found, goals)
    ordered = [done[i] for i in range(len(cases))]
    return VerificationResult(ordered, wanted, time.perf_counter() - began)


def _weight(case: Case) -> int:
    """Roughly how long a case takes, to begin with the longest."""
    world = case.world
    ways = len(world.kinds) * world.samples * (1 + world.faults.most)
    return int(ways**world.world_size)


def _outcome(case: Case, limits: Limits) -> tuple[Exploration[Key, Action], frozenset[str]]:
    result = explore_case(case, limits, Watcher())
    return result.exploration, result.goals


def explore_case(case: Case, limits: Limits, watcher: Watcher) -> CaseResult:
    """Explore one case. If it breaks a promise, it is explored again without reductions, for a
    shortest run in which every rank has its name."""
    system = ClosedSystem(case.world, case.reduction)
    found = explore(system, system.question(), limits, watcher.states)
    if found.violation is not None and case.reduction != NONE:
        plain = ClosedSystem(case.world)
        again = explore(plain, plain.question(), limits)
        if again.violation is not None:
            system, found = plain, again
    return CaseResult(case, system, found, system.goals_reached())


# ---------------------------------------------------------------- promise by promise


@dataclass(frozen=True)
class PromiseResult:
    """One promise over all cases. `violation`: of the first case that broke it."""

    name: str
    statement: str
    verdict: Verdict
    states: int
    violation: Violation[Key, Action] | None


def by_promise(result: VerificationResult) -> list[PromiseResult]:
    """What became of each promise. A promise that is not the one that fell in a refuted case, which
    was not explored further, is unknown."""
    rows = []
    for name, statement in statements().items():
        falls = [r for r in result.broken if _violation(r).promise == name]
        if falls:
            verdict = Verdict.REFUTED
        elif result.verdict is Verdict.HOLDS:
            verdict = Verdict.HOLDS
        else:
            verdict = Verdict.UNKNOWN if _open(result) else Verdict.HOLDS
        violation = _violation(falls[0]) if falls else None
        rows.append(PromiseResult(name, statement, verdict, result.states, violation))
    return rows


def _open(result: VerificationResult) -> bool:
    return any(r.verdict is not Verdict.HOLDS for r in result.cases)


def _violation(result: CaseResult) -> Violation[Key, Action]:
    assert result.exploration.violation is not None
    return result.exploration.violation


def statements() -> dict[str, str]:
    """Every promise about behaviour over time, with all that it says."""
    found: dict[str, str] = {}
    promises = [*NODE_PROMISES, *END_PROMISES]
    for name, promise in promises:
        text = " ".join((promise.__doc__ or "").split())
        found[name] = f"{found[name]} {text}" if name in found else text
    found["bounded-termination"] += " No run goes round in a circle."
    return found


def describe_coverage(cases: Sequence[Case]) -> str:
    """What exactly a verification covers, in one sentence."""
    worlds = [case.world for case in cases]
    ranks = sorted({world.world_size for world in worlds})
    samples = sorted({world.samples for world in worlds})
    faults = max(world.faults.most for world in worlds)
    faulty = sorted({world.world_size for world in worlds if world.faults.most})
    windows = sorted({world.config.window for world in worlds})
    text = (
        f"{len(cases)} worlds of {_range(ranks)} ranks with up to {samples[-1]} samples each of up "
        f"to {max(len(world.kinds) for world in worlds)} kinds, windows of {_range(windows)}, "
        f"queues of {_range(sorted({world.queue for world in worlds}))} steps, "
        f"up to {max(world.epochs for world in worlds)} epochs"
    )
    if faults:
        text += f"; with {_range(faulty)} ranks up to {faults} faults (a sample, a batch, a crash)"
    return text


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
