"""The synthetic long-tail dataset that the benchmarks read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from odb.errors import ConfigError


@dataclass(frozen=True)
class LengthSpec:
    """How many samples there are and how long they are: lognormal with this mean and coefficient
    of variation (`spread`), in tokens, cut off at `longest`."""

    samples: int = 20_000
    mean: float = 300.0
    spread: float = 1.0
    longest: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1 or self.longest < 1 or self.mean <= 0 or self.spread <= 0:
            raise ConfigError(
                f"cannot draw {self.samples} samples of mean {self.mean:g}, spread "
                f"{self.spread:g} and at most {self.longest} tokens: all must be positive"
            )
        if self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, not {self.seed}")


def draw_lengths(spec: LengthSpec) -> npt.NDArray[np.int64]:
    """The lengths that a spec stands for: the same on every machine, each from 1 to `longest`."""
    variance = math.log(1 + spec.spread**2)
    generator = np.random.default_rng(spec.seed)
    drawn = generator.lognormal(
        math.log(spec.mean) - variance / 2, math.sqrt(variance), spec.samples
    )
    return np.clip(np.rint(drawn), 1, spec.longest).astype(np.int64)


class SyntheticDataset(Dataset[dict[str, torch.Tensor]]):
    """Dict samples of three int64 tensors, cut from one buffer: about as cheap as a memory-mapped,
    already tokenized dataset, so that the loaders are measured and not the reading."""

    def __init__(self, lengths: npt.NDArray[np.int64]) -> None:
        self.lengths: list[int] = lengths.tolist()
        longest = max(self.lengths)
        self._tokens = torch.arange(1, longest + 1)
        self._ones = torch.ones(longest, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self.lengths[index]
        tokens = self._tokens[:length]
        return {"input_ids": tokens, "attention_mask": self._ones[:length], "labels": tokens}
