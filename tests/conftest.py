"""What several test modules share."""

from __future__ import annotations

import pytest

from proofs.check import CheckedTheorem, check_all


@pytest.fixture(scope="session")
def theorems() -> list[CheckedTheorem]:
    """Every theorem, checked once for all tests: by z3 and, if it is installed, by cvc5."""
    return check_all(jobs=2)
