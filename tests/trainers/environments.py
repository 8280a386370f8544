"""Environments for trainers whose pins conflict with odb's or with each other's.

    python -m tests.trainers.environments [NAME ...] [--install-only] [--strict]

`make test-trainers` runs this: it makes the environments that are missing (`.trainers/NAME`, from
`requirements/NAME.txt`), runs each one's tests in it, and prints a table of all verdicts. One that
cannot be installed is skipped, and the reason is printed; with `--strict` that is a failure.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.trainers.verdicts import VERDICTS, Verdict, read_verdicts, summaries

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".trainers"
TOOLS = ("pytest==9.2.0", "pytest-timeout==2.4.0")
INSTALL_TIMEOUT_S = 1200
TEST_TIMEOUT_S = 1500


@dataclass(frozen=True)
class Environment:
    """tests: those of `tests/trainers/test_*.py` that need it."""

    name: str
    tests: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        return FOLDER / f"{self.name}.log"

    def requirements(self) -> Iterator[tuple[str, ...]]:
        """Arguments of one `pip install` after another."""
        own, bare = (
            HERE / "requirements" / f"{self.name}{suffix}" for suffix in (".txt", ".no-deps.txt")
        )
        yield ("-c", str(ROOT / "constraints.txt"), "-e", str(ROOT), *TOOLS, "-r", str(own))
        if bare.exists():
            yield ("--no-deps", "-r", str(bare))

    def fingerprint(self) -> str:
        """Differs when what is to be installed differs."""
        files = [ROOT / "constraints.txt", *(HERE / "requirements").glob(f"{self.name}.*")]
        # Of the rest of pyproject.toml nothing is installed.
        project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dep")[0]
        parts = [sys.version, project, *TOOLS, *(path.read_text() for path in sorted(files))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


SEPARATE = (
    Environment(
        "common",
        ("deepspeed", "fairscale", "hf_deepspeed", "megatron", "megatron_pipelines", "torchtitan"),
    ),
    Environment("colossalai", ("colossalai",)),
    Environment("llamafactory", ("llamafactory",)),
)
"""Each with pins of its own, in `requirements/`."""

MAIN = "main"
"""The environment of `make test`: what is in no separate one is tested there."""


class InstallError(Exception):
    """An environment cannot be made; the message says why, in one line."""


def install(environment: Environment) -> None:
    """Make an environment, unless it is there already. Raises InstallError."""
    stamp = environment.folder / ".ready"
    if stamp.exists() and stamp.read_text() == environment.fingerprint():
        return
    shutil.rmtree(environment.folder, ignore_errors=True)
    FOLDER.mkdir(exist_ok=True)
    pip = (str(environment.python), "-m", "pip")
    with environment.log.open("w") as log:
        _install_step(environment, log, sys.executable, "-m", "venv", str(environment.folder))
        for arguments in environment.requirements():
            _install_step(environment, log, *pip, "install", *arguments)
    stamp.write_text(environment.fingerprint())


def _install_step(environment: Environment, log: IO[str], *command: str) -> None:
    try:
        done = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise InstallError(
            f"`{' '.join(command[1:4])} ...` took longer than {INSTALL_TIMEOUT_S} s"
        ) from error
    if done.returncode:
        lines = environment.log.read_text().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no output"]
        raise InstallError(f"{errors[-1]} (all of it: {environment.log.relative_to(ROOT)})")


def run_tests(python: Path, tests: Sequence[str]) -> int:
    """Run the tests of these frameworks; pytest's exit code, or 1 if they took too long."""
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",  # for ninja
    }
    files = [str((HERE / f"test_{name}.py").relative_to(ROOT)) for name in tests]
    # Fixtures of other tests need packages that only the main environment has.
    command = [str(python), "-m", "pytest", "--confcutdir", str(HERE), *files]
    try:
        return subprocess.run(
            command, cwd=ROOT, env=variables, timeout=TEST_TIMEOUT_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return 1


def tests_of_main() -> tuple[str, ...]:
    """The tests that need no separate environment."""
    elsewhere = {name for environment in SEPARATE for name in environment.tests}
    found = (path.stem.removeprefix("test_") for path in HERE.glob("test_*.py"))
    return tuple(sorted(set(found) - elsewhere))


def verdict_table(verdicts: Sequence[Verdict]) -> tuple[Table, list[str]]:
    """One row for each framework and way of using it: the worst of its cases. Also the notes that
    the rows point to: what could not run on a CPU as it is, and how it was tested."""
    table = Table(title="Exact gradients, by framework", title_justify="left")
    table.box, table.padding = box.SIMPLE_HEAD, (0, 1, 0, 0)
    table.add_column("framework", min_width=30)
    for heading in (
        "version",
        "on a CPU",
        "A",
        "off by",
        "steps equal",
        "samples once",
        "naive is off",
        "extra lines",
    ):
        table.add_column(heading)
    rows = sorted(summaries(verdicts), key=lambda row: row.framework.lower())
    notes = [note for note in dict.fromkeys(row.runs_on_cpu for row in rows) if note != "yes"]
    for row in rows:
        table.add_row(
            row.framework,
            row.version,
            "yes" if row.runs_on_cpu == "yes" else f"note {notes.index(row.runs_on_cpu) + 1}",
            row.accumulations,
            row.off_by,
            _yes(row.steps_equal),
            _yes(row.samples_once),
            row.naive,
            str(row.extra_lines),
        )
    return table, notes


def _yes(holds: bool) -> str:
    return "[green]yes[/green]" if holds else "[red]NO[/red]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, test and report; 1 if a test failed (with --strict also if one was skipped)."""
    names = [MAIN, *(environment.name for environment in SEPARATE)]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument("--strict", action="store_true", help="an environment skipped is a failure")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(names):
        parser.error(f"no environment {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    failed, skipped = [], []
    for name in options.names or names:
        console.rule(f"environment {name}")
        environment = next((one for one in SEPARATE if one.name == name), None)
        if environment is not None:
            try:
                install(environment)
            except InstallError as error:
                skipped.append((environment, str(error)))
                continue
        python = Path(sys.executable) if environment is None else environment.python
        tests = tests_of_main() if environment is None else environment.tests
        if not options.install_only and run_tests(python, tests):
            failed.append(name)
    if not options.install_only:
        table, notes = verdict_table(read_verdicts())
        console.print(table)
        for number, note in enumerate(notes, 1):
            console.print(f"note {number}: {escape(note)}")
        console.print(f"the numbers of every case: {VERDICTS.relative_to(ROOT)}")
    for environment, reason in skipped:
        console.print(
            f"[yellow]skipped[/yellow] {', '.join(environment.tests)}: the environment "
            f"{environment.name} cannot be installed: {escape(reason)}"
        )
    for name in failed:
        console.print(f"[red]failed[/red] tests in the environment {name}")
    return int(bool(failed) or (options.strict and bool(skipped)))


if __name__ == "__main__":
    sys.exit(main())
