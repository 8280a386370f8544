"""What several test modules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from proofs.check import CheckedTheorem, check_all


@pytest.fixture(scope="session")
def theorems() -> list[CheckedTheorem]:
    """Every theorem, checked once for all tests: by z3 and, if it is installed, by cvc5."""
    return check_all(jobs=2)


@pytest.fixture(scope="module")
def spread(request: pytest.FixtureRequest) -> Iterator[Callable[..., Mapping[str, Future[Any]]]]:
    """`spread(test, function)`: the function's results for the `name` of every case of that test
    which is to run, worked out two at a time, in the order of the cases."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:

        def start(test: str, function: Callable[[str], Any]) -> Mapping[str, Future[Any]]:
            cases = [
                item.callspec.params["name"]
                for item in request.session.items
                if isinstance(item, pytest.Function) and item.originalname == test
            ]
            return {name: pool.submit(function, name) for name in cases}

        yield start
        pool.shutdown(cancel_futures=True)
