"""The explorer and SPIN agree, on small models written down for both.

SPIN (spinroot.com) is a model checker by others; `apt-get install spin` brings it. The Promela
below and the models in `tests.known_models` have the same atomic steps, so that states can be
counted and counterexamples measured against each other.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from model_check.explorer import Property, Question, Verdict, explore
from tests.known_models import AfterYou, TwoLocks

pytestmark = pytest.mark.skipif(
    not (shutil.which("spin") and shutil.which("gcc")), reason="SPIN is not installed"
)

TWO_LOCKS = """
bool lock[2];
active [2] proctype P() {
  do
  :: atomic { !lock[FIRST] -> lock[FIRST] = 1 };
     atomic { !lock[1 - FIRST] -> lock[1 - FIRST] = 1 };
     d_step { lock[0] = 0; lock[1] = 0 }
  od
}
"""

# A process that is through waits at an "end" label: one that ends takes a step that ours has not.
AFTER_YOU = """
bool want[2];
bool inside[2];
active [2] proctype P() {
  do
  :: want[_pid] = 1;
     if
     :: atomic { !want[1 - _pid] -> inside[_pid] = 1 };
progress:
        d_step { assert(!inside[1 - _pid]); inside[_pid] = 0; want[_pid] = 0 };
        break
     :: want[1 - _pid] -> want[_pid] = 0
     fi
  od;
end:
  false
}
"""

TURNS = """
bool want[2];
bool inside[2];
byte turn;
active [2] proctype P() {
  d_step { want[_pid] = 1; turn = 1 - _pid };
  atomic { (!want[1 - _pid] || turn == _pid) -> inside[_pid] = 1 };
progress:
  d_step { assert(!inside[1 - _pid]); inside[_pid] = 0; want[_pid] = 0 };
end:
  false
}
"""


@dataclass(frozen=True)
class SpinResult:
    """What SPIN reports. `steps`: of its counterexample, if it wrote one."""

    errors: int
    states: int
    steps: int | None
    output: str


def spin(promela: str, folder: Path, compiler: tuple[str, ...], run: tuple[str, ...]) -> SpinResult:
    """Generate, compile and run SPIN's verifier of a model."""

    def call(*command: str) -> str:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    (folder / "model.pml").write_text(promela)
    call("spin", "-a", "model.pml")
    call("gcc", "-O1", "-w", "-DNOREDUCE", *compiler, "-o", "pan", "pan.c")
    output = call("./pan", *run)
    errors, states = re.search(r"errors: (\d+)", output), re.search(r"(\d+) states, st", output)
    assert errors, output
    assert states, output
    trail = folder / "model.pml.trail"
    steps = None
    if trail.exists():
        # Lines that begin with a negative number are headers, or the beginning of a cycle.
        steps = sum(not line.startswith("-") for line in trail.read_text().splitlines())
    return SpinResult(int(errors[1]), int(states[1]), steps, output)


BREADTH_FIRST = ("-DSAFETY", "-DBFS")
NON_PROGRESS = ("-DNP",)


def test_both_find_the_same_shortest_deadlock(tmp_path: Path) -> None:
    theirs = spin(TWO_LOCKS.replace("FIRST", "_pid"), tmp_path, BREADTH_FIRST, ())
    assert theirs.errors == 1
    assert "invalid end state" in theirs.output
    model = TwoLocks(ordered=False)
    ours = explore(model, Question([Property(model.never_stuck, at_end=True)]))
    assert ours.verdict is Verdict.REFUTED
    assert ours.violation is not None
    assert ours.violation.states[-1] == (1, 1)
    assert theirs.steps is not None
    # In the trail of a deadlock the last line names the process that cannot go on.
    assert len(ours.violation.actions) == theirs.steps - 1 == 2


def test_both_accept_locks_that_are_taken_in_the_same_order(tmp_path: Path) -> None:
    theirs = spin(TWO_LOCKS.replace("FIRST", "0"), tmp_path, BREADTH_FIRST, ())
    model = TwoLocks(ordered=True)
    ours = explore(model, Question([Property(model.never_stuck, at_end=True)]))
    assert theirs.errors == 0
    assert ours.verdict is Verdict.HOLDS
    assert ours.states == theirs.states == 5


@pytest.mark.parametrize("fair", [(), ("-f",)], ids=["any scheduler", "weakly fair"])
def test_both_find_a_cycle_without_progress(tmp_path: Path, fair: tuple[str, ...]) -> None:
    theirs = spin(AFTER_YOU, tmp_path, NON_PROGRESS, ("-l", *fair))
    assert theirs.errors == 1
    assert "non-progress cycle" in theirs.output
    ours = explore(AfterYou(turns=False), Question(terminates="bounded-termination"))
    assert ours.verdict is Verdict.REFUTED
    assert ours.violation is not None
    assert ours.violation.promise == "bounded-termination"
    again = ours.violation.states[ours.violation.repeats or 0 :]
    assert again[0] == again[-1]
    assert all("inside" not in state.at for state in again)


def test_both_accept_taking_turns(tmp_path: Path) -> None:
    theirs = spin(TURNS, tmp_path, NON_PROGRESS, ("-l",))
    assert theirs.errors == 0
    model = AfterYou(turns=True)
    question = Question([Property(model.one_inside)], terminates="bounded-termination")
    ours = explore(model, question)
    assert ours.verdict is Verdict.HOLDS
    assert ours.ends == 1 + 1  # whichever raised its flag last


@pytest.mark.parametrize(("promela", "turns"), [(AFTER_YOU, False), (TURNS, True)])
def test_both_count_the_same_states_and_never_see_both_inside(
    tmp_path: Path, promela: str, turns: bool
) -> None:
    theirs = spin(promela, tmp_path, ("-DSAFETY",), ())
    model = AfterYou(turns)
    ours = explore(model, Question([Property(model.one_inside)]))
    assert theirs.errors == 0
    assert ours.verdict is Verdict.HOLDS
    assert ours.states == theirs.states == (17 if turns else 24)
