"""The shape of the project: dependencies point one way, and the core stays pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import spec.exchange
import spec.rank
from odb import interpreter
from spec import lockstep

ROOT = Path(__file__).parent.parent
PACKAGES = ("spec", "model_check", "proofs", "odb")
MAY_IMPORT = {
    "spec": set(),
    "model_check": {"spec"},
    "proofs": {"spec", "model_check"},
    "odb": {"spec", "model_check", "proofs"},
}
LAZY_ONLY = {"odb": {"model_check", "proofs"}}
LAZILY_IMPORTED = ("verification", "tracing")
"""Folders in `odb` that are imported when they are asked for (of `tracing`, the checking half)."""


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_dependencies_point_one_way(package: str) -> None:
    for path in modules(package):
        ours = imports(path) & set(PACKAGES) - {package}
        assert ours <= MAY_IMPORT[package], path
        eager = imports(path, top_level_only=True)
        lazily_imported_itself = path.parent.name in LAZILY_IMPORTED
        assert lazily_imported_itself or not eager & LAZY_ONLY.get(package, set()), path


def test_importing_odb_loads_no_checker() -> None:
    code = (
        "import sys, odb, odb.cli, odb.tracing; "
        "print([m for m in sys.modules if m.partition('.')[0] in ('model_check', 'proofs')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_core_imports_pure_standard_library_only() -> None:
    forbidden = {"time", "random", "os", "threading", "socket", "asyncio", "subprocess"}
    for path in modules("spec"):
        used = imports(path) - {"spec"}
        assert used <= sys.stdlib_module_names, path
        assert not used & forbidden, path


def test_only_the_transport_talks_to_other_ranks() -> None:
    for path in modules("odb"):
        if "distributed" in path.read_text() and path.name not in ("transport.py", "groups.py"):
            tree = ast.parse(path.read_text())
            calls = {
                node.func.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "dist"
            }
            loader_side = ROOT / "odb" in path.parents and path.parent.name == "odb"
            collectives = {"all_reduce", "all_gather", "broadcast", "barrier", "new_group"}
            assert not (loader_side and calls & collectives), path


def test_the_loader_runs_the_very_functions_of_the_core() -> None:
    assert interpreter.transition is spec.rank.transition is lockstep.transition
    assert interpreter.decode is spec.exchange.decode


def test_modules_are_small() -> None:
    for package in PACKAGES:
        for path in modules(package):
            assert len(path.read_text().splitlines()) <= 420, path


def test_a_foreign_package_called_spec_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "spec.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import odb"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "not odb's" in result.stderr
    assert result.returncode != 0
