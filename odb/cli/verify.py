"""`odb verify`: explore every interleaving of small worlds, with every promise in each state."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from odb.errors import ConfigError, MissingDependencyError, ODBError

if TYPE_CHECKING:
    from model_check.render.trace import Trace
    from odb.verification.run import Request
    from proofs.check import CheckedTheorem


def verify(
    profile: Annotated[str, typer.Option(help="quick (a minute) or full (many).")] = "quick",
    ranks: Annotated[int | None, typer.Option(help="Your own bounds: ranks.")] = None,
    samples: Annotated[int | None, typer.Option(help="... most samples of a rank.")] = None,
    window: Annotated[int | None, typer.Option(help="... window, in samples.")] = None,
    budget: Annotated[int | None, typer.Option(help="... token budget.")] = None,
    queue: Annotated[int | None, typer.Option(help="... output queue, in steps.")] = None,
    costs: Annotated[str | None, typer.Option(help="... costs of samples, such as 1,3,9.")] = None,
    quota: Annotated[int | None, typer.Option(help="... quota, for quota mode.")] = None,
    mode: Annotated[str, typer.Option(help="... join-pad, join-stop, quota or all.")] = "all",
    faults: Annotated[
        bool | None,
        typer.Option("--faults/--no-faults", help="Only worlds with faults, or without."),
    ] = None,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Check that every changed protocol falls.")
    ] = False,
    real: Annotated[
        bool,
        typer.Option("--real", help="With --mutants: see that the real loader falls by them, too."),
    ] = False,
    reductions: Annotated[
        bool, typer.Option("--reductions", help="Compare the search with and without reductions.")
    ] = False,
    proofs: Annotated[
        bool, typer.Option("--proofs", help="Prove the theorems, for any number of ranks.")
    ] = False,
    bounded: Annotated[
        bool,
        typer.Option(
            "--bounded",
            help="Unroll whole epochs with Z3, for all costs and budgets; with --mutants the "
            "changed protocols, too; with --profile full larger ones.",
        ),
    ] = False,
    smt: Annotated[
        Path | None, typer.Option(help="With --proofs: write SMT-LIB files into this folder.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Random schedules, for sizes beyond exhaustion.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the simulation: the same gives the same.")] = 0,
    minutes: Annotated[float, typer.Option(help="How long to simulate.")] = 1.0,
    explain: Annotated[str | None, typer.Option(help="Say what a promise means.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="Give up a world after this.")] = None,
    max_states: Annotated[int | None, typer.Option(help="Give up a world after this.")] = None,
    jobs: Annotated[int, typer.Option(help="Worlds or proofs at a time, each in a process.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write JSON to this file (- for stdout).")
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write counterexamples as pages into this folder.")
    ] = None,
) -> None:
    """Explore every interleaving of small worlds, and check every promise in every state.

    A whole profile also proves the theorems (with Z3; --proofs asks cvc5 as well). Exits with 0
    only if everything was explored to the end and held, and all was proved. A limit that was hit
    leaves the verdict UNKNOWN, and the exit code is 1, as for a promise that fell.
    """
    try:
        _require_extra()
        if real and not mutants:
            raise ConfigError("--real goes with --mutants")
        given = {
            "ranks": ranks, "samples": samples, "window": window, "budget": budget,
            "queue": queue, "costs": _costs(costs), "quota": quota,
        }  # fmt: skip
        request = _request(profile, given, mode, faults)
        request = replace(request, max_seconds=max_seconds, max_states=max_states, jobs=jobs)
        console = Console(stderr=json_file == Path("-"), highlight=False)
        outputs = _Outputs(json_file, junit, html)
        if explain is not None:
            _explain(explain, console)
        elif reductions:
            _reductions(request, outputs, console)
        elif proofs:
            _prove(smt, jobs, outputs, console)
        elif bounded:
            _bounded(request, mutants, outputs, console)
        elif simulate:
            _simulate(Simulated(given, mode, faults, seed, minutes), outputs, console)
        elif mutants:
            _mutants(real, outputs, console)
        else:
            _verify(request, outputs, console)
    except ODBError as error:
        typer.echo(f"odb verify: {error}", err=True)
        raise typer.Exit(2) from error


@dataclass(frozen=True)
class Simulated:
    """What to simulate: bounds that were given (None: the default), and for how long."""

    bounds: dict[str, Any]
    mode: str
    faults: bool | None
    seed: int
    minutes: float


@dataclass(frozen=True)
class _Outputs:
    """Where results go besides the terminal."""

    json_file: Path | None
    junit: Path | None
    html: Path | None

    def write_json(self, report: dict[str, Any]) -> None:
        """Write a report, if one was asked for: to the file, or to stdout for `-`."""
        if self.json_file == Path("-"):
            typer.echo(json.dumps(report))
        elif self.json_file is not None:
            self.json_file.write_text(json.dumps(report, indent=2) + "\n")


def _require_extra() -> None:
    try:
        import networkx  # noqa: F401
        import z3  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f'odb verify needs {error.name}: pip install "verified-odb[verify]"'
        ) from error


def _costs(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"costs must be whole numbers, such as 1,3,9, not {text!r}") from error


def _request(profile: str, given: dict[str, Any], mode: str, faults: bool | None) -> Request:
    from model_check.profiles import Bounds
    from odb.verification.run import Request

    chosen = {name: value for name, value in given.items() if value is not None}
    bounds = Bounds(**chosen, faults=int(bool(faults))) if chosen else None
    return Request(profile, bounds, tuple(mode.split(",")), faults)


def _verify(request: Request, outputs: _Outputs, console: Console) -> None:
    from odb.verification.files import as_json, write_junit
    from odb.verification.run import run_verification, traces
    from odb.verification.tables import verdict_text, verification_view
    from odb.verification.theorems import proof_view, run_proofs

    progress_console = Console(stderr=True)
    result = run_verification(request, progress_console)
    console.print(verification_view(result))
    console.print("\nverdict: ", verdict_text(result.verdict), sep="", end="\n")
    # The theorems belong to a whole profile.
    theorems: list[CheckedTheorem] = []
    if request.wanted:
        theorems = run_proofs(progress_console, second=False, jobs=request.jobs)
    if theorems:
        console.print(proof_view(theorems))
    _show(traces(result, []), outputs, console)
    outputs.write_json(as_json(result, theorems=theorems))
    if outputs.junit is not None:
        write_junit(outputs.junit, result, theorems=theorems)
    proved = all(row.proof.value == "proved" for row in theorems)
    raise typer.Exit(0 if result.verdict.value == "holds" and proved else 1)


def _mutants(in_reality: bool, outputs: _Outputs, console: Console) -> None:
    from odb.verification.files import as_json, write_junit
    from odb.verification.run import run_mutants, run_replays, traces
    from odb.verification.tables import mutant_table

    judged = run_mutants((), Console(stderr=True))
    real = run_replays(judged, Console(stderr=True)) if in_reality else []
    console.print(mutant_table(judged, real))
    _write_pages(traces(None, judged), outputs, console)
    outputs.write_json(as_json(None, judged, real=real))
    if outputs.junit is not None:
        write_junit(outputs.junit, None, judged, real=real)
    good = all(row.as_expected for row in judged) and all(row.as_expected for row in real)
    raise typer.Exit(0 if good else 1)


def _show(named: list[tuple[str, Trace]], outputs: _Outputs, console: Console) -> None:
    """Print the first counterexample, if there is one, and write all of them as pages."""
    from model_check.render.text import as_text

    for _, trace in named[:1]:
        console.print("\n" + as_text(trace), soft_wrap=True, markup=False)
    _write_pages(named, outputs, console)


def _write_pages(named: list[tuple[str, Trace]], outputs: _Outputs, console: Console) -> None:
    from odb.verification.run import write_traces

    if outputs.html is not None:
        pages = write_traces(outputs.html, named)
        console.print(f"wrote {len(pages)} counterexamples into {outputs.html}", soft_wrap=True)


def _explain(name: str, console: Console) -> None:
    from odb.verification.run import explain
    from odb.verification.theorems import explain_theorems

    console.print(f"{name}: {explain(name)}\n\n{explain_theorems(name)}", soft_wrap=True)


def _prove(smt: Path | None, jobs: int, outputs: _Outputs, console: Console) -> None:
    from odb.verification.theorems import as_json, proof_view, run_proofs
    from proofs.check import write_smtlib

    results = run_proofs(Console(stderr=True), jobs=jobs)
    console.print(proof_view(results))
    if smt is not None:
        console.print(f"wrote {write_smtlib(smt, results)} files into {smt}", soft_wrap=True)
    outputs.write_json({"theorems": as_json(results)})
    raise typer.Exit(0 if all(r.proof.value == "proved" for r in results) else 1)


def _bounded(request: Request, variants: bool, outputs: _Outputs, console: Console) -> None:
    from odb.verification.bounded import as_json, bounded_view, run_bounded

    large = request.profile == "full"
    progress = Console(stderr=True)
    found = run_bounded(progress, large=large, variants=variants, jobs=request.jobs)
    console.print(bounded_view(found))
    outputs.write_json(as_json(found))
    raise typer.Exit(0 if found.good else 1)


def _reductions(request: Request, outputs: _Outputs, console: Console) -> None:
    from odb.verification.reductions import as_json, compare_reductions, reduction_view, settled

    rows = compare_reductions(request, Console(stderr=True))
    console.print(reduction_view(rows))
    outputs.write_json({"reductions": as_json(rows)})
    raise typer.Exit(0 if all(map(settled, rows)) else 1)


def _simulate(wish: Simulated, outputs: _Outputs, console: Console) -> None:
    from odb.verification.simulation import as_json, run_simulation, trace_of_failure

    result = run_simulation(wish, Console(stderr=True))
    console.print(str(result), soft_wrap=True)
    named = [] if result.failure is None else [("simulation", trace_of_failure(result.failure))]
    _show(named, outputs, console)
    outputs.write_json(as_json(result))
    # A sample proves nothing, so the verdict is UNKNOWN at best; but nothing broke.
    raise typer.Exit(0 if result.failure is None else 1)
