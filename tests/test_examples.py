"""The examples run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def torchrun(script: str, ranks: int = 2, timeout: float = 120, **variables: str) -> str:
    """Run an example on local ranks and return what it prints. variables: of its environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", str(EXAMPLES / script)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_plain_ddp() -> None:
    printed = torchrun("train_ddp.py")
    rows = re.findall(r"epoch (\d) rank (\d): (\d+) steps, (\d+) samples", printed)
    assert len(rows) == 4
    for epoch in "01":
        of_epoch = {(steps, samples) for e, _, steps, samples in rows if e == epoch}
        assert len(of_epoch) == 1, "ranks took different steps"
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", printed)]
    assert max(losses[2:]) < min(losses[:2])
