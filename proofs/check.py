"""Proves every theorem, refutes every mutant, and asks a second solver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

from model_check.prover import Obligation, Proof, ProofResult
from proofs.catalogue import THEOREMS
from proofs.second import Opinion, as_file, ask_cvc5, cvc5_is_there
from proofs.theorem import Theorem, prover


@dataclass
class Checked:
    """An obligation, its mutants, and what the second solver says (nothing, if it is not there)."""

    result: ProofResult
    mutants: dict[str, ProofResult] = field(default_factory=dict)
    opinions: list[Opinion] = field(default_factory=list)

    @property
    def proof(self) -> Proof:
        """PROVED only if the obligation is, every mutant is refuted, and no solver disagrees."""
        if self.result.proof is not Proof.PROVED:
            return self.result.proof
        refuted = all(mutant.proof is Proof.REFUTED for mutant in self.mutants.values())
        agreed = all(opinion.agrees for opinion in self.opinions)
        return Proof.PROVED if refuted and agreed else Proof.UNKNOWN


@dataclass
class CheckedTheorem:
    """A theorem and its obligations."""

    theorem: Theorem
    checked: list[Checked] = field(default_factory=list)

    @property
    def proof(self) -> Proof:
        """The least of its obligations'."""
        proofs = {checked.proof for checked in self.checked}
        for least in (Proof.REFUTED, Proof.UNKNOWN):
            if least in proofs or not self.checked:
                return least
        return Proof.PROVED

    @property
    def paths(self) -> int:
        """Paths of all obligations."""
        return sum(checked.result.paths for checked in self.checked)

    @property
    def seconds(self) -> float:
        """Time of all obligations, mutants and the second solver aside."""
        return sum(checked.result.seconds for checked in self.checked)


def check_theorem(theorem: Theorem, module: ModuleType, *, second: bool) -> CheckedTheorem:
    """Prove a theorem's obligations and refute their mutants."""
    found = [_check(module, obligation, second) for obligation in theorem.obligations]
    return CheckedTheorem(theorem, found)


def check_all(
    progress: Callable[[str], None] | None = None, *, second: bool | None = None, jobs: int = 1
) -> list[CheckedTheorem]:
    """Check every theorem. progress: is called with the name of a theorem when an obligation of it
    is settled. second: whether to ask cvc5 (default: if it is installed). jobs: processes."""
    ask = cvc5_is_there() if second is None else second
    found: dict[tuple[int, int], Checked] = {}
    for place, checked in _each(ask, jobs):
        theorem = THEOREMS[place[0]][0]
        found[place] = _with_obligation(checked, theorem.obligations[place[1]])
        if progress is not None:
            progress(theorem.promise)
    return [
        CheckedTheorem(theorem, [found[t, o] for o in range(len(theorem.obligations))])
        for t, (theorem, _) in enumerate(THEOREMS)
    ]


Place = tuple[int, int]
"""The number of a theorem, and of an obligation in it."""


def _each(second: bool, jobs: int) -> Iterator[tuple[Place, Checked]]:
    places = [
        (t, o) for t, (theorem, _) in enumerate(THEOREMS) for o in range(len(theorem.obligations))
    ]
    if jobs == 1:
        for place in places:
            yield place, _check_at(place, second)
        return
    # Not forked: z3 and torch hold threads and locks that a forked process cannot use.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting: dict[Future[Checked], Place] = {
            pool.submit(_check_at, place, second): place for place in places
        }
        for future in as_completed(waiting):
            yield waiting[future], future.result()


def _check_at(place: Place, second: bool) -> Checked:
    """Settle an obligation; what is found crosses processes, so without the obligation itself."""
    theorem, module = THEOREMS[place[0]]
    return _with_obligation(_check(module, theorem.obligations[place[1]], second), NOBODYS)


NOBODYS = Obligation("", "", None, None)  # type: ignore[arg-type]


def _check(module: ModuleType, obligation: Obligation, second: bool) -> Checked:
    engine = prover(module)
    result = engine.prove(obligation)
    mutants = {name: engine.refute(obligation, m) for name, m in obligation.mutants.items()}
    opinions = [ask_cvc5(condition) for condition in result.conditions] if second else []
    return Checked(result, mutants, opinions)


def _with_obligation(checked: Checked, obligation: Obligation) -> Checked:
    mutants = {n: replace(m, obligation=obligation) for n, m in checked.mutants.items()}
    return Checked(replace(checked.result, obligation=obligation), mutants, checked.opinions)


def write_smtlib(folder: Path, results: Sequence[CheckedTheorem]) -> int:
    """Write every condition as an SMT-LIB file, for any solver; how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for result in results:
        for checked in result.checked:
            obligation: Obligation = checked.result.obligation
            for condition in checked.result.conditions:
                name = f"{result.theorem.promise}-{obligation.name}-{condition.name}"
                path = folder / ("".join(c if c.isalnum() else "-" for c in name) + ".smt2")
                path.write_text(f"; {obligation.says}\n{as_file(condition)}")
                count += 1
    return count
