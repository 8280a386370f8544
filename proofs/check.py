"""Proves every theorem, refutes every mutant, and asks a second solver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    engine = prover(module)
    found = CheckedTheorem(theorem)
    for obligation in theorem.obligations:
        result = engine.prove(obligation)
        mutants = {n: engine.prove(obligation, m) for n, m in obligation.mutants.items()}
        opinions = [ask_cvc5(condition) for condition in result.conditions] if second else []
        found.checked.append(Checked(result, mutants, opinions))
    return found


def check_all(
    progress: Callable[[str], None] | None = None, *, second: bool | None = None
) -> list[CheckedTheorem]:
    """Check every theorem. second: whether to ask cvc5 (default: if it is installed)."""
    ask = cvc5_is_there() if second is None else second
    results = []
    for theorem, module in THEOREMS:
        if progress is not None:
            progress(theorem.promise)
        results.append(check_theorem(theorem, module, second=ask))
    return results


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
