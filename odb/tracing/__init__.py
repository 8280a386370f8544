"""Traces of real runs: each rank records what its state machine does, and `check` replays it.

`odb.ODBDataLoader(..., trace_dir=folder)` records; `odb.tracing.check(folder)` replays all ranks
through `spec` and judges the promises over the merged run. docs/TRACES.md describes the format.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from odb.tracing.reading import TraceError
from odb.tracing.report import (
    Divergence,
    EpochReport,
    Judged,
    Kind,
    PromiseResult,
    Report,
    Verdict,
)

__all__ = [
    "Divergence",
    "EpochReport",
    "Judged",
    "Kind",
    "PromiseResult",
    "Report",
    "TraceError",
    "Verdict",
    "check",
]


def check(
    folder: str | os.PathLike[str],
    epoch: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Check the traces below `folder`: all epochs, or the one that is named.

    The report `conforms` only if every rank's trace is there, is complete and does what the spec
    does. Raises TraceError for files that are no traces, or do not belong together.
    """
    from odb.tracing.checking import check_folder

    if progress is None:
        return check_folder(Path(folder), epoch)
    return check_folder(Path(folder), epoch, progress)
