"""The pytest plugin as its users meet it: in a test session of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent


def test_it_is_registered() -> None:
    found = [entry for entry in entry_points(group="pytest11") if entry.name == "odb"]
    assert [entry.value for entry in found] == ["pytest_odb"]


def test_it_costs_nothing_when_it_is_not_used(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_plain():
            assert "pytest_odb" in sys.modules
            assert not {"odb", "torch", "numpy"} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_its_fixtures_are_listed_with_what_they_do(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--fixtures")
    result.stdout.fnmatch_lines(["odb_ranks*", "*Runs a function on local ranks*"])
    result.stdout.fnmatch_lines(["odb_faults*", "*Makes faults happen in this process*"])


TESTS = """
import time

import odb
import pytest
from odb.testing import FaultPlan, KillRank, RaiseInSample, RankError

SAMPLES = [{"input_ids": [1] * 10}] * 40

def train(rank, world_size, seconds=0):
    time.sleep(seconds)
    loader = odb.ODBDataLoader(SAMPLES, token_budget=40, window=8)
    return sum(info.local_samples for _, info in loader.steps())

def test_ranks(odb_ranks):
    assert odb_ranks(train, 2, start_method="fork") == [20, 20]

def test_ranks_with_faults(odb_ranks):
    plan = FaultPlan(KillRank(rank=0, step=2))
    results = odb_ranks(train, 2, start_method="fork", check=False, faults=plan)
    assert [type(failure.error) for failure in results.failures] == [type(None), odb.PeerLostError]

def test_the_time_limit_is_a_setting(odb_ranks):
    with pytest.raises(RankError, match="after 2 s"):
        odb_ranks(train, 1, 60, start_method="fork")

def test_here(odb_faults):
    active = odb_faults(RaiseInSample(rank=0, sample=3))
    with pytest.raises(odb.PipelineError):
        train(0, 1)
    assert active.unfired == ()

def test_the_fault_is_over():
    assert train(0, 1) == 40

def test_vacuous(odb_faults):
    odb_faults(RaiseInSample(rank=0, sample=99))
    assert train(0, 1) == 40
"""


def test_ranks_and_faults(pytester: pytest.Pytester) -> None:
    """The last test passes, and its fault never happened: that is an error."""
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nodb_timeout = 2\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=6, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_vacuous*"])
    result.stdout.fnmatch_lines(["*UnfiredFaultsError: 1 of the faults never happened:*"])
    result.stdout.fnmatch_lines(["*RaiseInSample(rank=0, sample=99)*"])


def test_the_example_runs_as_its_first_line_says() -> None:
    file = ROOT / "examples" / "test_my_trainer.py"
    (command,) = re.findall(r"Run: (pytest \S+)$", file.read_text(), re.MULTILINE)
    result = subprocess.run(
        [sys.executable, "-m", *command.split(), "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert "5 passed" in result.stdout
