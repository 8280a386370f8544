"""Ranks for frameworks that look at the environment that `torchrun` makes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from odb.testing import run_ranks
from tests.test_examples import torchrun

ROOT = Path(__file__).parents[2]


def run_example(name: str, **variables: str) -> str:
    """What an example that uses Hugging Face's libraries prints on two ranks."""
    return torchrun(name, timeout=180, HF_HUB_OFFLINE="1", **variables)


def run_as_torchrun(fn: Callable[..., Any], *args: Any, timeout: float, ranks: int = 2) -> Any:
    """`run_ranks` with spawned processes, each with torchrun's variables. The process group exists
    already, so that no framework opens the port that the variables name."""
    return run_ranks(_call, ranks, fn, args, start_method="spawn", timeout=timeout)


def _call(rank: int, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29511",
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="odb-tests",
        HF_HUB_OFFLINE="1",
    )
    return fn(rank, world_size, *args)
