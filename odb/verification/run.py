"""Carries out what `odb verify` was asked for, with a progress display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from model_check.explorer import Limits
from model_check.goals import GOALS
from model_check.mutants import Fall, MutantResult, judge_all
from model_check.profiles import MODE_NAMES, PROFILES, Bounds, Case, custom, mode_of
from model_check.render.html import as_html
from model_check.render.mermaid import as_mermaid
from model_check.render.text import as_text
from model_check.render.trace import Trace, trace_of
from model_check.verify import (
    CaseResult,
    VerificationResult,
    Watcher,
    statements,
    verify,
    verify_in_parallel,
)
from odb.errors import ConfigError
from odb.verification.reality import RealFall, replay_falls
from spec.variants import VARIANTS


@dataclass(frozen=True)
class Request:
    """What to explore: a profile, or worlds within bounds of the user's own.

    bounds: None for the profile. modes: names of `MODE_NAMES`, or ("all",). faults: of a profile
    only the worlds with faults, or those without, or (None) both. max_states, max_seconds: for each
    world; what they cut off is unknown. jobs: worlds to explore at a time, each in a process.
    """

    profile: str = "quick"
    bounds: Bounds | None = None
    modes: tuple[str, ...] = ("all",)
    faults: bool | None = None
    max_states: int | None = None
    max_seconds: float | None = None
    jobs: int = 1

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise ConfigError(f"profile must be one of {', '.join(PROFILES)}, not {self.profile!r}")
        unknown = set(self.modes) - {*MODE_NAMES, "all"}
        if unknown:
            choices = ", ".join((*MODE_NAMES, "all"))
            raise ConfigError(f"mode must be one of {choices}, not {', '.join(sorted(unknown))!r}")
        if self.jobs < 1:
            raise ConfigError(f"jobs must be at least 1, not {self.jobs}")
        if self.bounds is not None:
            _check(self.bounds)

    @property
    def cases(self) -> list[Case]:
        """The worlds."""
        modes = MODE_NAMES if "all" in self.modes else self.modes
        if self.bounds is not None:
            return custom(self.bounds, modes)
        return [
            case
            for case in PROFILES[self.profile]()
            if mode_of(case) in modes and self.faults in (None, case.world.faults.most > 0)
        ]

    @property
    def wanted(self) -> frozenset[str]:
        """The goals: a profile has to reach all; what is chosen of it, or bounds of one's own, may
        be too small for that."""
        whole = self.bounds is None and "all" in self.modes and self.faults is None
        return frozenset(GOALS) if whole else frozenset()


def _check(bounds: Bounds) -> None:
    for field in fields(bounds):
        value = getattr(bounds, field.name)
        if field.name not in ("faults", "quota", "costs") and value < 1:
            raise ConfigError(f"{field.name} must be at least 1, not {value}")
    if bounds.faults < 0 or (bounds.quota is not None and bounds.quota < 1):
        raise ConfigError("faults must be at least 0, and a quota at least 1")
    if not bounds.costs or min(bounds.costs) < 0 or len(set(bounds.costs)) < len(bounds.costs):
        raise ConfigError("costs must be different whole numbers of 0 or more, such as 1,3,9")


def run_verification(request: Request, console: Console) -> VerificationResult:
    """Explore the worlds of a request."""
    with _progress(console) as progress:
        task = progress.add_task("", total=None, detail="")
        limits = Limits(request.max_states, request.max_seconds)
        watcher = _watcher(progress, task)
        if request.jobs == 1:
            return verify(request.cases, request.wanted, limits, watcher)
        return verify_in_parallel(request.cases, request.wanted, limits, watcher, request.jobs)


def _watcher(progress: Progress, task: TaskID) -> Watcher:
    def on_case(number: int, of: int, name: str) -> None:
        progress.update(task, total=of, completed=number, description=name)

    def on_states(count: int, depth: int) -> None:
        progress.update(task, detail=f"{count:,} states, depth {depth}")

    return Watcher(on_case, on_states)


def run_mutants(names: Sequence[str], console: Console) -> list[MutantResult]:
    """Judge the variants of these names, or all."""
    unknown = set(names) - set(VARIANTS)
    if unknown:
        raise ConfigError(f"there is no variant {', '.join(sorted(unknown))!r}")
    chosen = {name: VARIANTS[name] for name in (names or VARIANTS)}
    with _progress(console) as progress:
        task = progress.add_task("", total=len(chosen), detail="")

        def on_variant(name: str) -> None:
            progress.update(task, description=name, advance=1)

        return judge_all(chosen, on_variant)


def run_replays(judged: Sequence[MutantResult], console: Console) -> list[RealFall]:
    """Take the real loader through the runs by which variants fell."""
    with _progress(console) as progress:
        task = progress.add_task("", total=len(judged), detail="in the real loader")

        def on_variant(name: str) -> None:
            progress.update(task, description=name, advance=1)

        return replay_falls(judged, on_variant)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


# ---------------------------------------------------------------- counterexamples


def traces(
    result: VerificationResult | None, mutants: Sequence[MutantResult]
) -> list[tuple[str, Trace]]:
    """The counterexamples of a verification and of variants, each with a name for its files."""
    found = []
    for row in result.broken if result is not None else ():
        found.append((_file_name(row.case.name), trace_of(_fall(row), row.case.name)))
    for mutant in mutants:
        if mutant.fall is not None:
            title = f"{mutant.name}: {mutant.variant.description}"
            found.append((mutant.name, trace_of(mutant.fall, title)))
    return found


def _fall(row: CaseResult) -> Fall:
    assert row.exploration.violation is not None
    return Fall(row.case, row.system, row.exploration.violation)


def _file_name(title: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in title.lower()).strip("-")


def write_traces(folder: Path, named: Sequence[tuple[str, Trace]]) -> list[Path]:
    """Write each counterexample as a page, a sequence diagram and text; the pages' paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = []
    for name, trace in named:
        page = folder / f"{name}.html"
        page.write_text(as_html(trace))
        (folder / f"{name}.mmd").write_text(as_mermaid(trace))
        (folder / f"{name}.txt").write_text(as_text(trace))
        pages.append(page)
    return pages


def explain(name: str) -> str:
    """What is checked of a promise in every state, in plain English."""
    known = statements()
    if name not in known:
        raise ConfigError(f"there is no promise {name!r}; there are {', '.join(known)}")
    return known[name]
