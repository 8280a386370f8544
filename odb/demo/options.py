"""What a demo run is asked for, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from odb.errors import ConfigError

HELD_OUT_SHARE = 1 / 24
"""The share of the functions that no way trains on; the validation loss is taken on them."""

SMALLEST_LENGTH = 16
"""Shorter sequences would cut off every function's body."""


@dataclass(frozen=True)
class DemoOptions:
    """One run of the demo.

    ranks: processes that train together. workers: DataLoader workers of each rank.
    samples: functions taken from the standard library, held-out ones included.
    epochs: how often each way goes through its training samples.
    budget: most tokens of one rank's batch, padding included.
    window: samples that ODB may hold to form batches of, and that the sorted way sorts at a time.
    max_length: tokens after which a function is cut off.
    accumulate: steps of the fixed ways for each update of the weights; None: as many as make their
        updates about as large as ODB's.
    seed: of the choice of functions, their order and the model's first weights.
    out: folder for the plot and the numbers. time_limit: seconds after which the ranks are ended.

    Raises ConfigError for numbers that cannot work.
    """

    ranks: int = 2
    samples: int = 3600
    epochs: int = 1
    budget: int = 4096
    window: int = 1024
    max_length: int = 1024
    accumulate: int | None = None
    seed: int = 0
    workers: int = 0
    out: Path = Path("odb-demo")
    time_limit: float = 900.0

    def __post_init__(self) -> None:
        for name in ("ranks", "epochs", "window", "time_limit"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be more than 0")
        if self.accumulate is not None and self.accumulate < 1:
            raise ConfigError("--accumulate must be 1 or more")
        if self.workers < 0 or self.seed < 0:
            raise ConfigError("--workers and --seed must be 0 or more")
        if self.max_length < SMALLEST_LENGTH:
            raise ConfigError(f"--max-length must be at least {SMALLEST_LENGTH} tokens")
        if self.budget < self.max_length:
            raise ConfigError(
                f"--budget ({self.budget} tokens) must hold one sample of --max-length "
                f"({self.max_length} tokens)"
            )
        if self.held_out < 1 or self.train_samples < self.ranks:
            raise ConfigError(
                f"--samples {self.samples} is too few: take at least {max(16, 2 * self.ranks)}"
            )

    @property
    def held_out(self) -> int:
        """How many of the functions are held out for validation."""
        return int(self.samples * HELD_OUT_SHARE)

    @property
    def train_samples(self) -> int:
        """How many of the functions are trained on."""
        return self.samples - self.held_out
