"""The environments of `make test-trainers`: what is in them, what is said of one that fails."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.trainers import environments
from tests.trainers.environments import SEPARATE, Environment, InstallError
from tests.trainers.verdicts import Verdict

VERDICT = Verdict(
    framework="some framework",
    version="1.0",
    runs_on_cpu="yes",
    extra_lines=2,
    accumulation=1,
    dtype="float32",
    max_difference=1e-8,
    naive_difference=0.25,
    blocks=4,
    optimizer_steps=(4, 4),
    idle_steps=1,
    steps_equal=True,
    samples_once=True,
    problems=(),
)


def test_every_test_runs_in_one_environment() -> None:
    separate = [name for environment in SEPARATE for name in environment.tests]
    main = environments.tests_of_main()
    assert "ddp" in main
    assert len(set(separate)) == len(separate)
    assert not set(separate) & set(main)
    for name in (*separate, *main):
        assert (environments.HERE / f"test_{name}.py").exists()


@pytest.mark.parametrize("environment", SEPARATE, ids=lambda environment: environment.name)
def test_frameworks_are_pinned(environment: Environment) -> None:
    pins = "".join(
        path.read_text()
        for path in (environments.HERE / "requirements").glob(f"{environment.name}.*")
    )
    for name in environment.tests:
        package = "megatron-core" if name.startswith("megatron") else name.removeprefix("hf_")
        assert f"{package}==" in pins


def test_one_that_cannot_be_installed_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FOLDER", "HERE", "ROOT"):
        monkeypatch.setattr(environments, name, tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "requirements").mkdir()
    with pytest.raises(InstallError, match=r"ERROR: .*requirements.*absent\.txt.*absent\.log"):
        environments.install(Environment("absent", ()))
    assert not (tmp_path / "absent" / ".ready").exists()


def test_the_table_shows_the_worst_case_and_numbers_its_notes() -> None:
    wrong = replace(VERDICT, accumulation=3, max_difference=0.5, steps_equal=False)
    other = replace(VERDICT, framework="another", runs_on_cpu="needs [a] GPU", extra_lines=7)
    table, notes = environments.verdict_table([VERDICT, wrong, other])
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table)
    rows = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert notes == ["needs [a] GPU"]
    assert "another 1.0 note 1 1 1.0e-08 yes yes 2.5e-01 7" in rows
    assert "some framework 1.0 yes 1, 3 5.0e-01 NO yes 2.5e-01 2" in rows
