"""What all adapters keep: imports come late, and few modules talk to other ranks."""

from __future__ import annotations

import ast
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import odb
from odb.info import ODBStepInfo
from odb.integrations import base
from odb.integrations.progress import Progress
from odb.integrations.steps import StepLoop

ADAPTERS = Path(base.__file__).parent
FRAMEWORKS = (
    "accelerate", "colossalai", "datasets", "deepspeed", "fairscale", "lightning", "llamafactory",
    "megatron", "torchtitan", "transformers", "trl",
)  # fmt: skip

TALK_TO_OTHER_RANKS = {"ddp.py", "mesh.py"}
"""`ddp` sends an optimizer's state at the end of Join, and `mesh` makes groups. Whatever else has
to cross goes through `odb.transport`, whose waiting can be left and names late ranks."""

COLLECTIVES = (
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "new_group",
    "new_subgroups", "reduce", "scatter", "send", "recv", "monitored_barrier",
)  # fmt: skip


def imported_by(*modules: str) -> set[str]:
    code = f"import sys, {', '.join(modules)}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return set(result.stdout.split())


def test_no_framework_is_imported_before_it_is_asked_for() -> None:
    asked = ("odb", "odb.cli", *(f"odb.integrations.{name}" for name in (
        "base", "ddp", "fsdp2", "mesh", "progress", "schedule",
    )))  # fmt: skip
    assert not imported_by(*asked) & set(FRAMEWORKS)


def collectives(path: Path) -> set[str]:
    """What a module calls on `torch.distributed` that other ranks must take part in."""
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("dist", "torch.distributed")
    }
    return {name for name in called if name.startswith(COLLECTIVES)}


def test_only_few_adapters_talk_to_other_ranks() -> None:
    talking = {path.name for path in ADAPTERS.glob("*.py") if collectives(path)}
    assert talking == TALK_TO_OTHER_RANKS


def test_a_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(odb.MissingDependencyError, match=r"nothere is not installed: pip install"):
        base.require("nothere.sub", "nothere")
    with pytest.raises(odb.MissingDependencyError, match=r'"verified-odb\[extra\]"'):
        base.require("nothere", "extra", package="not-here")
    with pytest.raises(odb.MissingDependencyError, match="nothere is not installed"):
        base.version_of("nothere")
    assert base.require("torch", "torch") is torch
    assert base.version_of("torch") == torch.__version__


def test_a_package_that_fails_to_import_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "halfthere.py").write_text("import missingpart")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(odb.MissingDependencyError, match=r"cannot be imported .*missingpart"):
        base.require("halfthere", "extra")


def test_an_old_torch_without_fsdp2_is_told_apart() -> None:
    code = (
        "import sys, odb; sys.modules['torch.distributed.fsdp'] = None\n"
        "try: import odb.integrations.fsdp2\n"
        "except odb.MissingDependencyError as error: print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "torch 2.6" in result.stdout


def test_facts_of_a_loader() -> None:
    data = [{"input_ids": [1, 2]}]
    loader = odb.ODBDataLoader(data, token_budget=8, accumulation_steps=4, group=None)
    assert base.facts_of(loader) == ((0,), 4, True, True)
    plain = torch.utils.data.DataLoader(data)  # type: ignore[arg-type, var-annotated]
    equipped = odb.apply(plain, token_budget=8, idle="stop", loss_scaling="none", group=None)
    assert base.facts_of(equipped) == ((0,), 1, False, False)
    assert base.check_exact(loader, [0], "the test").accumulation_steps == 4
    with pytest.raises(odb.IntegrationError, match=r"0, 1, 2, 3, 4, 5, 6, 7, \.\.\. \(9 in all\)"):
        base.check_exact(loader, range(9), "the test")


class Counting(StepLoop):
    """An engine that only counts."""

    def _around(self, info: ODBStepInfo) -> AbstractContextManager[Any]:
        return nullcontext()

    def _backward(self, scaled: Any) -> None:
        pass

    def _step(self, info: ODBStepInfo) -> bool:
        return info.last_in_block


def counting(progress: Progress | None = None, accumulation: int = 2) -> Counting:
    loader = odb.ODBDataLoader(
        [{"input_ids": [1, 2]}] * 8,
        token_budget=2,
        accumulation_steps=accumulation,
        group=None,
    )
    return Counting(loader, [0], "the test", progress)


def take(loop: Counting, steps: int) -> None:
    """So many steps, left as people do: before the first one that is too much."""
    for number, _ in enumerate(loop):
        if number == steps:
            break
        loop.backward(torch.ones(()))
        loop.step()


def test_a_loop_may_be_left_before_a_block_and_not_within_one() -> None:
    loop = counting()
    take(loop, 4)
    take(loop, 2)
    assert loop.progress.optimizer_steps == 3
    take(loop, 3)
    with pytest.raises(odb.IntegrationError, match="left within a block"):
        take(loop, 1)


def test_a_loop_that_is_done_takes_no_more_steps() -> None:
    progress = Progress(max_optimizer_steps=2)
    loop = counting(progress)
    for _ in range(3):  # epochs
        take(loop, 99)
    assert (progress.optimizer_steps, progress.steps) == (2, 4)


def test_an_integration_error_is_a_config_error() -> None:
    assert issubclass(odb.IntegrationError, odb.ConfigError)
    assert issubclass(odb.IntegrationError, ValueError)
