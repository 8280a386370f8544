"""Counts what a training has seen, from the infos of its steps: the same numbers on every rank.

    progress = Progress(max_samples=1_000_000)
    while not progress.done:
        for batch in loader:
            info = odb.pop_step_info(batch)
            ...
            progress.update(info)
            if progress.done:
                break

Batches hold a varying number of samples, so steps times batch size is no count of samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from odb.errors import ConfigError
from odb.info import ODBStepInfo

__all__ = ["Progress"]

LIMITS = ("max_samples", "max_tokens", "max_optimizer_steps", "samples_per_epoch")
COUNTS = (
    "steps",
    "optimizer_steps",
    "samples",
    "tokens",
    "weight",
    "epoch",
    "samples_in_epoch",
    "steps_in_block",
)


@dataclass
class Progress:
    """What all ranks together have trained on. Call `update` with each step's info, on every rank.

    max_samples, max_tokens, max_optimizer_steps: what ends the training, see `done`.
    samples_per_epoch: of all ranks together, if it is known, see `epochs`.

    steps: batches of each rank, idle ones included. optimizer_steps: blocks that have ended.
    samples, tokens, weight: of all ranks together; tokens are costs as `cost_fn` gives them, weight
        is what `loss_weight_fn` gives (label tokens).
    epoch, samples_in_epoch: the epoch of the latest step, and the samples of that epoch so far.
    steps_in_block: of the block that has not ended.

    With `idle="stop"` a rank counts to the step at which it stops, and `ddp.joined(model, loader,
    optimizer, progress)` gives it the whole count at the end of the epoch.

    Raises ConfigError for limits that are no whole numbers from 1.
    """

    max_samples: int | None = None
    max_tokens: int | None = None
    max_optimizer_steps: int | None = None
    samples_per_epoch: int | None = None
    steps: int = field(default=0, init=False)
    optimizer_steps: int = field(default=0, init=False)
    samples: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)
    weight: int = field(default=0, init=False)
    epoch: int = field(default=0, init=False)
    samples_in_epoch: int = field(default=0, init=False)
    steps_in_block: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name in LIMITS:
            limit = getattr(self, name)
            if limit is not None and (type(limit) is not int or limit < 1):
                raise ConfigError(f"{name} must be a whole number from 1, or None, not {limit!r}")

    def update(self, info: ODBStepInfo) -> None:
        """Count a step that was trained on."""
        if info.epoch != self.epoch:
            self.epoch, self.samples_in_epoch = info.epoch, 0
        self.steps += 1
        self.samples += info.global_samples
        self.samples_in_epoch += info.global_samples
        self.tokens += info.global_tokens
        self.weight += info.global_weight
        self.optimizer_steps += info.last_in_block
        self.steps_in_block = 0 if info.last_in_block else self.steps_in_block + 1

    @property
    def done(self) -> bool:
        """Whether a limit is reached. True after the last step of a block only, so that no
        gradients are left that no optimizer step has used; at the same step on all ranks. What that
        block has more than the limit is trained on."""
        return self.steps_in_block == 0 and any(part >= 1 for part in self._parts())

    @property
    def epochs(self) -> float | None:
        """The epoch and the part of it that is done, such as 1.25; None if `samples_per_epoch` is
        not known. Samples that the loader filters out are never counted, so an epoch may end a
        little below the whole number."""
        if self.samples_per_epoch is None:
            return None
        return self.epoch + min(1.0, self.samples_in_epoch / self.samples_per_epoch)

    @property
    def part(self) -> float | None:
        """The part of the way to the nearest limit, from 0.0 to 1.0; None if there is no limit."""
        parts = self._parts()
        return min(1.0, max(parts)) if parts else None

    def _parts(self) -> list[float]:
        limits = (
            (self.samples, self.max_samples),
            (self.tokens, self.max_tokens),
            (self.optimizer_steps, self.max_optimizer_steps),
        )
        return [count / limit for count, limit in limits if limit is not None]

    def state_dict(self) -> dict[str, Any]:
        """The counts, for a checkpoint. Limits are not in it: they are those of the new run."""
        return {name: getattr(self, name) for name in COUNTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these counts. Raises ConfigError if some are missing or unknown."""
        wrong = set(COUNTS) ^ set(state)
        if wrong:
            raise ConfigError(f"this is no state of a Progress: {sorted(wrong)} missing or unknown")
        for name in COUNTS:
            setattr(self, name, int(state[name]))
