"""How to test your trainer against ranks that fail. Run: pytest examples/test_my_trainer.py

`train` stands for your training function: any function of (rank, world_size, ...) that can be
imported. `odb_ranks` and `odb_faults` are fixtures that come with odb.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import odb
from odb.testing import FaultPlan, KillRank, KillWorker, RaiseInSample, StopRank

# ---------------------------------------------------------------- the trainer under test


class Corpus(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Two hundred samples of 5 to 44 tokens."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((5 + index % 40,), index)}


def train(rank: int, world_size: int, folder: Path, workers: int = 0) -> str:
    """Train for an epoch. If another rank dies, save a checkpoint and say why it ends."""
    loader = odb.ODBDataLoader(
        Corpus(), token_budget=256, window=16, num_workers=workers, timeout=30
    )
    weights, samples = torch.zeros(200), 0
    try:
        for batch in loader:
            info = odb.pop_step_info(batch)
            weights += torch.bincount(batch["input_ids"].flatten(), minlength=200)
            samples += info.local_samples
    except odb.PeerLostError as error:
        torch.save(weights, folder / f"emergency-{rank}.pt")
        return f"saved, as rank {error.rank} is gone"
    finally:
        loader.close()
    return f"trained on {samples} samples"


# ---------------------------------------------------------------- its tests


def test_it_trains(odb_ranks: Any, tmp_path: Path) -> None:
    assert odb_ranks(train, 2, tmp_path) == ["trained on 100 samples"] * 2


def test_it_saves_a_checkpoint_when_a_rank_dies(odb_ranks: Any, tmp_path: Path) -> None:
    """Rank 1 is killed as it asks for step 5. `check=False`: that it returns nothing is no news."""
    results = odb_ranks(train, 3, tmp_path, check=False, faults=FaultPlan(KillRank(rank=1, step=5)))
    assert [failure.rank for failure in results.failures] == [1]
    assert results.values == ("saved, as rank 1 is gone", None, "saved, as rank 1 is gone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["emergency-0.pt", "emergency-2.pt"]


def test_it_survives_a_pause(odb_ranks: Any, tmp_path: Path) -> None:
    plan = FaultPlan(StopRank(rank=0, step=3, seconds=2.0))
    assert odb_ranks(train, 2, tmp_path, faults=plan) == ["trained on 100 samples"] * 2


def test_all_ranks_stop_alike_when_a_worker_is_killed(odb_ranks: Any, tmp_path: Path) -> None:
    plan = FaultPlan(KillWorker(rank=0, worker=1))
    results = odb_ranks(train, 2, tmp_path, 2, check=False, faults=plan)
    first, second = (failure.error for failure in results.failures)
    assert isinstance(first, odb.PipelineError)
    assert isinstance(second, odb.PeerFailedError)
    assert second.rank == 0
    assert first.step == second.step


def test_a_bad_sample_is_named(odb_faults: Any, tmp_path: Path) -> None:
    """In this process, without any other rank."""
    odb_faults(RaiseInSample(rank=0, sample=7))
    with pytest.raises(odb.PipelineError, match="sample 7"):
        train(0, 1, tmp_path)
