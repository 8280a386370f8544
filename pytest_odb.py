"""The pytest plugin of odb: the fixtures `odb_ranks` and `odb_faults` (see docs/TESTING.md).

A module of its own, as pytest imports it in every run: importing `odb` here would import torch,
which tests that use neither fixture should not wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from odb.testing import ActiveFaults, Fault


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the setting."""
    parser.addini(
        "odb_timeout", "seconds after which `odb_ranks` ends ranks that have not returned", "string"
    )


@pytest.fixture
def odb_ranks(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Runs a function on local ranks: `odb_ranks(train, 2, *args, faults=FaultPlan(...))`.

    This is `odb.testing.run_ranks`, with the time limit of the setting `odb_timeout` (60 s).
    """
    from odb.testing import run_ranks

    timeout = float(request.config.getini("odb_timeout") or 60)

    def run(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> Any:
        return run_ranks(fn, world_size, *args, **{"timeout": timeout, **options})

    return run


@pytest.fixture
def odb_faults() -> Iterator[Callable[..., ActiveFaults]]:
    """Makes faults happen in this process until the test ends: `odb_faults(RaiseInSample(0, 7))`.

    For loaders in the test's own process, which is rank 0. Ranks that `odb_ranks` starts take
    theirs as `faults=`. A fault that never happened fails the test.
    """
    from odb.testing import FaultPlan

    with ExitStack() as stack:

        def activate(*faults: Fault, must_fire: bool = True) -> ActiveFaults:
            return stack.enter_context(FaultPlan(*faults, must_fire=must_fire))

        yield activate
