"""Writes a verification's result for other programs: JSON, and JUnit XML for CI."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model_check.explorer import Verdict
from model_check.mutants import MutantResult
from model_check.prover import Proof
from model_check.verify import VerificationResult, by_promise, describe_coverage
from odb.verification.reality import RealFall
from odb.verification.theorems import as_json as theorems_as_json
from proofs.check import CheckedTheorem


def as_json(
    result: VerificationResult | None,
    mutants: Sequence[MutantResult] = (),
    theorems: Sequence[CheckedTheorem] = (),
    real: Sequence[RealFall] = (),
) -> dict[str, Any]:
    """Everything that the tables show, and the runs that break a promise."""
    report: dict[str, Any] = {}
    if result is not None:
        report["verdict"] = result.verdict.value
        report["covered"] = describe_coverage([row.case for row in result.cases])
        report["seconds"] = result.seconds
        report["unmet_goals"] = result.unmet
        report["worlds"] = [_case(row) for row in result.cases]
        report["promises"] = [
            {"name": row.name, "verdict": row.verdict.value, "statement": row.statement}
            for row in by_promise(result)
        ]
    if mutants:
        report["mutants"] = [_mutant(row) for row in mutants]
    if real:
        report["in_the_real_loader"] = [_real(row) for row in real]
    if theorems:
        report["theorems"] = theorems_as_json(theorems)
    return report


def _case(row: Any) -> dict[str, Any]:
    found = row.exploration
    fields = {
        "name": row.case.name,
        "ranks": row.case.world.world_size,
        "verdict": row.verdict.value,
        "states": found.states,
        "transitions": found.transitions,
        "depth": found.depth,
        "ends": found.ends,
        "seconds": found.seconds,
        "reduced_by": [n for n in ("symmetry", "ample") if getattr(row.case.reduction, n)],
    }
    if found.violation is not None:
        fields["violation"] = {
            "promise": found.violation.promise,
            "text": found.violation.text,
            "actions": list(map(str, found.violation.actions)),
        }
    return fields


def _mutant(row: MutantResult) -> dict[str, Any]:
    fall = row.fall
    return {
        "name": row.name,
        "description": row.variant.description,
        "fell": row.as_expected,
        "promise": None if fall is None else fall.violation.promise,
        "actions": None if fall is None else list(map(str, fall.violation.actions)),
        "world": None if fall is None else fall.case.name,
        "seconds": row.seconds,
    }


def _real(row: RealFall) -> dict[str, Any]:
    return {
        "name": row.name,
        "fell": row.as_expected,
        "promise": row.promise,
        "text": row.text,
        "actions": row.performed,
        "difference": None if row.difference is None else str(row.difference),
        "waiting": None if row.standstill is None else str(row.standstill),
        "outward": list(row.outward),
        "seconds": row.seconds,
    }


def write_junit(
    path: Path,
    result: VerificationResult | None,
    mutants: Sequence[MutantResult] = (),
    theorems: Sequence[CheckedTheorem] = (),
    real: Sequence[RealFall] = (),
) -> None:
    """Write a JUnit file: a test case for each promise, world, goal, variant and theorem."""
    suites = ET.Element("testsuites", name="odb verify")
    if result is not None:
        promises = ET.SubElement(suites, "testsuite", name="promises")
        for row in by_promise(result):
            text = row.violation.text if row.violation is not None else "not explored to the end"
            _test(promises, row.name, "" if row.verdict is Verdict.HOLDS else text)
        worlds = ET.SubElement(suites, "testsuite", name="worlds")
        for case in result.cases:
            bad = case.verdict is not Verdict.HOLDS
            _test(worlds, case.case.name, case.verdict.value if bad else "")
        goals = ET.SubElement(suites, "testsuite", name="goals")
        for name in sorted(result.wanted):
            _test(goals, name, "never happened" if name in result.unmet else "")
    if mutants:
        suite = ET.SubElement(suites, "testsuite", name="variants that must fall")
        for mutant in mutants:
            _test(suite, mutant.name, "" if mutant.as_expected else "survived")
    if real:
        suite = ET.SubElement(suites, "testsuite", name="variants in the real loader")
        for fell in real:
            _test(suite, fell.name, "" if fell.as_expected else f"fell by {fell.promise}")
    if theorems:
        suite = ET.SubElement(suites, "testsuite", name="theorems")
        for theorem in theorems:
            proved = theorem.proof is Proof.PROVED
            _test(suite, theorem.theorem.promise, "" if proved else theorem.proof.value)
    for suite in suites:
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(len(suite.findall("testcase/failure"))))
    ET.indent(suites)
    ET.ElementTree(suites).write(path, encoding="unicode", xml_declaration=True)


def _test(suite: ET.Element, name: str, failure: str) -> None:
    case = ET.SubElement(suite, "testcase", name=name, classname=suite.get("name", ""))
    if failure:
        ET.SubElement(case, "failure", message=failure)
