"""What a Hugging Face Trainer has been trained on, and its state kept true to that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from odb.info import ODBStepInfo
from odb.integrations.base import require

require("transformers", "huggingface")

from transformers import TrainerCallback, TrainingArguments  # noqa: E402
from transformers.trainer_callback import (  # noqa: E402
    ProgressCallback,
    TrainerControl,
    TrainerState,
)


@dataclass
class Seen:
    """What the optimizer has been trained on in this call of `train`, on all ranks together.

    size: samples of an epoch, None if that is not known.
    """

    size: int | None = None
    samples: int = 0
    tokens: int = 0
    label_tokens: int = 0
    epoch: int = 0
    epoch_samples: int = 0
    epoch_ended: bool = False

    def add(self, info: ODBStepInfo) -> None:
        """Count the block that ends with this step."""
        if info.epoch != self.epoch:
            self.epoch, self.epoch_samples = info.epoch, 0
        self.samples += info.block_samples
        self.tokens += info.block_tokens
        self.label_tokens += info.block_weight
        self.epoch_samples += info.block_samples

    @property
    def epochs(self) -> float:
        """Epochs seen, with the fraction of the current one."""
        if self.epoch_ended:
            return self.epoch + 1.0
        return self.epoch + (min(self.epoch_samples / self.size, 1.0) if self.size else 0.0)


class Bookkeeper(TrainerCallback):
    """Keeps the Trainer's state true to what was trained on."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.seen.epoch_ended = False

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.check_wrapped()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        seen = self._trainer.seen
        state.epoch = seen.epochs
        if args.max_steps > 0:
            # The rest of the loss is logged, as what is not would be this rank's share only.
            control.should_log = control.should_log or state.global_step >= state.max_steps
        elif state.epoch >= args.num_train_epochs and args.num_train_epochs % 1:
            self._finish(args, state, control)
        else:
            # Never reached, as the DefaultFlowCallback would stop there.
            share = state.epoch / args.num_train_epochs
            likely = math.ceil(state.global_step / share) if share else 0
            self._expect_steps(state, max(likely, state.global_step + 2))

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        seen = self._trainer.seen
        state.epoch = seen.epochs
        if args.max_steps <= 0 and state.epoch >= args.num_train_epochs:
            self._finish(args, state, control)

    def _finish(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        """What the Trainer does at its last step, which it cannot tell by itself."""
        self._expect_steps(state, state.global_step)
        control.should_training_stop = control.should_log = True
        if args.save_strategy == "steps" and state.global_step % state.save_steps:
            control.should_save = True

    def _expect_steps(self, state: TrainerState, steps: int) -> None:
        state.max_steps = steps
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                callback.training_bar.total = steps

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._trainer.close_loader()
