"""Hugging Face Trainer: odb's batches, exact gradients and truthful counts.

    trainer = ODBTrainer(model, args, train_dataset=dataset, data_collator=collator,
                         odb=ODBOptions(token_budget=16384))
    trainer.train()

`ODBTrainerMixin` equips a subclass of Trainer in the same way. See docs/trainers/huggingface.md.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from odb.costs import CostFn
from odb.errors import IntegrationError, MissingDependencyError
from odb.info import STEP_INFO_KEY, ODBStepInfo, pop_step_info
from odb.integrations.base import check_exact, check_parallelism, version_of
from odb.integrations.deepspeed import check_driven, count_samples
from odb.integrations.hf_counts import Bookkeeper, Seen
from odb.integrations.hf_loader import (
    ODBOptions,
    averaged_over,
    check_accelerator,
    check_args,
    check_epochs,
    check_smoothing,
    loader_settings,
    loss_weight_of,
)
from odb.loader import ODBDataLoader

from transformers import Trainer, TrainingArguments  # isort: skip
from transformers.optimization import GreedyLR  # isort: skip

__all__ = ["ODBOptions", "ODBTrainer", "ODBTrainerMixin", "Seen"]

OLDEST = (5, 6)
"""The oldest transformers whose training loop has the hooks that are used here."""

if tuple(int(part) for part in version_of("transformers").split(".")[:2]) < OLDEST:
    raise MissingDependencyError(
        f"transformers {version_of('transformers')} is too old, as its training loop lacks hooks: "
        'pip install "verified-odb[huggingface]"'
    )


class _NoStep(dict[str, Any]):
    """Stands for a step that a shorter last block does not have. Nothing is run for it."""


class ODBTrainerMixin:
    """Equips a subclass of `transformers.Trainer`: `class Mine(ODBTrainerMixin, MyTrainer): ...`

    Takes the keyword argument `odb=ODBOptions(...)` beside those of the trainer. The training data
    loader is an ODBDataLoader over `train_dataset` and `data_collator`; evaluation is untouched.
    `self.seen` holds what has been trained on, with the block of the step under way if that ends
    it; `self.odb_last` is the info of that step.

    A subclass's own `compute_loss` must return the mean loss of the batch over what its loss
    weights count, as it does without `num_items_in_batch`, which is always None.

    Raises IntegrationError for TrainingArguments that would make batches, counts or gradients
    wrong; the message says what to set.
    """

    def __init__(self, *args: Any, odb: ODBOptions, **kwargs: Any) -> None:
        if not isinstance(odb, ODBOptions):
            raise IntegrationError(f"pass odb=ODBOptions(token_budget=...), not {odb!r}")
        self.odb_options = odb
        self.seen = Seen()
        self.odb_last: ODBStepInfo | None = None
        self._odb_info: ODBStepInfo | None = None
        self._odb_scaled = False
        self._odb_loader: ODBDataLoader | None = None
        for given in (*args, *kwargs.values()):
            if isinstance(given, TrainingArguments):
                check_args(given)
        super().__init__(*args, **kwargs)
        check_args(self._trainer.args)
        check_parallelism(self._trainer.accelerator)
        # The loss scale makes it exact for the whole block. Trainers that do not know this
        # attribute divide by the number of steps; see `_divisor`.
        self.loss_is_scaled_for_ga: bool | None = True
        callbacks = self._trainer.callback_handler.callbacks
        # Behind the Trainer's own, which decides on logs, and before those that read the state.
        callbacks.insert(1, Bookkeeper(self))

    @property
    def _trainer(self) -> Any:
        return self

    # ------------------------------------------------------------ data

    def get_train_dataloader(self) -> Any:
        """The odb loader over `train_dataset`, which the Trainer does not wrap.

        Raises IntegrationError as `check_args` does, and if the loader does not align exactly the
        ranks over which the Trainer averages gradients.
        """
        trainer = self._trainer
        if trainer.train_dataset is None:
            raise IntegrationError("training requires a train_dataset")
        check_args(trainer.args)
        settings = loader_settings(
            self.odb_options, trainer.args, trainer.train_dataset, trainer.data_collator
        )
        settings["loss_weight_fn"] = self.odb_options.loss_weight_fn or self.loss_weight_fn()
        self.close_loader()
        self._odb_loader = self.make_train_loader(trainer.train_dataset, settings)
        check_exact(self._odb_loader, range(trainer.args.world_size), "the Trainer")
        return self._odb_loader

    def make_train_loader(self, dataset: Any, settings: dict[str, Any]) -> ODBDataLoader:
        """Build the loader of these settings. Override it to change what it is made of."""
        return ODBDataLoader(dataset, **settings)

    def loss_weight_fn(self) -> CostFn | None:
        """The loss weight of a sample where `ODBOptions` has none; None for the loader's default.

        Raises IntegrationError if it cannot be known before a sample is collated.
        """
        return loss_weight_of(self._trainer.data_collator)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """The batches of the next block.

        A shorter last block is preceded by empty entries, as the Trainer takes its optimizer step
        only when it has counted `gradient_accumulation_steps` of them. There is no number of items
        (None): the loss scale has the weight of the block in it.
        """
        batches = []
        for batch in epoch_iterator:
            batches.append(batch)
            if _info_of(batch).last_in_block:
                break
        if not batches:
            self.seen.epoch_ended = True
            self._trainer.control.should_epoch_stop = True
            return [], None
        empty = torch.zeros(0, dtype=torch.int64)
        name = getattr(self._trainer.model, "main_input_name", "input_ids")
        missing = [
            _NoStep({name: empty, "attention_mask": empty})
            for _ in range(num_batches - len(batches))
        ]
        return [*missing, *batches], None

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[int, int, int, int, int, int, int]:
        """How long to train: `max_steps` steps of the optimizer if it is set, and
        `num_train_epochs` epochs otherwise, whose number of steps is known at their end.

        Raises IntegrationError if epochs are to be counted and the dataset has no length.
        """
        self.seen = Seen(self._epoch_size())
        size = self.seen.size
        # An optimizer step has a sample at least, so that no epoch has more steps than samples.
        if args.max_steps > 0:
            epochs, updates, steps = sys.maxsize, args.max_steps, args.max_steps
        elif size is None:
            raise IntegrationError("the size of an epoch is not known: set max_steps")
        else:
            check_epochs(args, self._trainer.accelerator)
            epochs = math.ceil(args.num_train_epochs)
            updates, steps = size, math.ceil(args.num_train_epochs * size)
        examples = 0 if size is None else size
        # Behind it: samples that will be seen (corrected in `log`), samples of a step (they
        # differ, so 0), and steps of an epoch, which must be no number that is ever reached.
        never = sys.maxsize - sys.maxsize % args.gradient_accumulation_steps
        return epochs, updates, examples, steps, 0, never, steps

    def _epoch_size(self) -> int | None:
        options, dataset = self.odb_options.loader, self._trainer.train_dataset
        if not options.get("join", True):
            return cast("int | None", options.get("quota"))
        if "sampler" in options:
            return None if self._bound_by_steps else self._samples_of_all_ranks()
        try:
            return len(dataset)
        except TypeError:
            return None

    def _samples_of_all_ranks(self) -> int | None:
        """What the samplers of all ranks hold together."""
        try:
            own = len(self.odb_options.loader["sampler"])
        except TypeError:
            return None
        trainer = self._trainer
        count = torch.tensor(own, device=trainer.args.device)
        return int(trainer.accelerator.gather(count).sum())

    @property
    def _bound_by_steps(self) -> bool:
        return bool(self._trainer.args.max_steps > 0)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train. Raises IntegrationError for `resume_from_checkpoint`, as a checkpoint of the
        Trainer does not hold the position of the loader."""
        if resume_from_checkpoint:
            raise IntegrationError(
                "resume_from_checkpoint: a checkpoint of the Trainer does not say which samples "
                "were delivered. Load the model with from_pretrained and start a new epoch"
            )
        return cast(Any, super()).train(resume_from_checkpoint, *args, **kwargs)

    # ------------------------------------------------------------ steps

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one step, idle ones included.

        Raises IntegrationError if the batch has another number of label tokens than the loss
        weights of its samples say, and if something keeps the loss scale from the backward.
        """
        if isinstance(inputs, _NoStep):
            return torch.zeros((), device=self._trainer.args.device)
        info = pop_step_info(inputs)
        self._check_weight(inputs, info)
        check_accelerator(self._trainer.accelerator)
        # DeepSpeed takes the optimizer's and the schedule's step within the backward.
        self._count(info)
        self._odb_info, self._odb_scaled = info, False
        try:
            loss = cast(Any, super()).training_step(model, inputs, None)
        finally:
            self._odb_info = None
        if not self._odb_scaled:
            raise IntegrationError(
                f"the compute_loss of {type(self).__name__} has gone past odb's, which applies the "
                "loss scale: put it into a class of its own, and odb's in front, as in "
                "class Mine(ODBTrainerMixin, MyTrainer), or let it call super().compute_loss()"
            )
        if info.idle:  # what the Trainer counts from here on
            for name, value in inputs.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    inputs[name] = value[:0]
        return cast(torch.Tensor, loss)

    def _count(self, info: ODBStepInfo) -> None:
        self.odb_last = info
        if info.last_in_block:
            self.seen.add(info)
        if self._trainer.is_deepspeed_enabled:
            count_samples(self._trainer.deepspeed, info)

    def check_wrapped(self) -> None:
        """Raise IntegrationError if what the Trainer has made of the model would make gradients
        wrong: a DeepSpeed engine (see `odb.integrations.deepspeed.check_engine`), or an FSDP2 that
        hides a causal model from label smoothing."""
        trainer = self._trainer
        if trainer.is_deepspeed_enabled:
            check_driven(trainer.deepspeed, self._odb_loader)
        if trainer.label_smoother is not None:
            check_smoothing(trainer.accelerator.unwrap_model(trainer.model))

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The trainer's own loss; in training, times the loss scale of the step."""
        info = self._odb_info
        items = num_items_in_batch if info is None else None
        result = cast(Any, super()).compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=items
        )
        if info is None:
            return result
        self._odb_scaled = True
        scale = info.loss_scale * self._divisor
        return (result[0] * scale, *result[1:]) if return_outputs else result * scale

    @property
    def _divisor(self) -> int:
        """What `training_step` is going to divide the loss by."""
        if hasattr(Trainer, "loss_is_scaled_for_ga") or self._trainer.compute_loss_func is not None:
            return 1
        return int(self._trainer.current_gradient_accumulation_steps)

    def _check_weight(self, inputs: Any, info: ODBStepInfo) -> None:
        if info.idle or self.odb_options.loss_weight_fn is not None:
            return
        trainer = self._trainer
        found = averaged_over(trainer.accelerator.unwrap_model(trainer.model), inputs)
        if found is not None and found != info.local_weight:
            raise IntegrationError(
                f"the loss of this batch is a mean over {found} labels, but the loss weights of "
                f"its samples add up to {info.local_weight}: the data collator makes, masks or "
                "cuts labels, or the model predicts others than a causal one would. Pass "
                "ODBOptions(loss_weight_fn=...), a function of a sample that returns how many "
                "labels it adds to that mean"
            )

    # ------------------------------------------------------------ schedule and counts

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler:
        """The learning-rate schedule: over `max_steps` steps if they are set, and over the samples
        of all epochs otherwise.

        Raises IntegrationError if it is over samples and its type cannot be.
        """
        trainer = self._trainer
        given = trainer.lr_scheduler is not None
        scheduler = cast(Any, super()).create_scheduler(num_training_steps, optimizer)
        if not given and not self._bound_by_steps:
            scheduler = trainer.lr_scheduler = self._by_samples(scheduler)
        return cast(LRScheduler, scheduler)

    def _by_samples(self, scheduler: LRScheduler) -> LRScheduler:
        """The same schedule, with samples seen in place of steps taken."""
        if isinstance(scheduler, ReduceLROnPlateau | GreedyLR):  # they go by a metric
            return scheduler
        if type(scheduler) is not LambdaLR:
            raise IntegrationError(
                f"{type(scheduler).__name__} counts steps, whose number is not known when training "
                "is bound by epochs: set max_steps, or a lr_scheduler_type such as cosine"
            )
        factors = [self._of_samples(factor) for factor in scheduler.lr_lambdas]
        return LambdaLR(scheduler.optimizer, factors)

    def _of_samples(self, factor: Callable[[int], float]) -> Callable[[int], float]:
        return lambda _: factor(self.seen.samples)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the samples that were really seen."""
        if "train_runtime" in logs:
            rate = self.seen.samples / max(logs["train_runtime"], 1e-9)
            logs["train_samples_per_second"] = round(rate, 3)
        if "train_runtime" in logs or "loss" in logs:
            logs["samples_seen"] = self.seen.samples
        cast(Any, super()).log(logs, *args, **kwargs)

    def close_loader(self) -> None:
        """Close the training loader; done at the end of `train`."""
        if self._odb_loader is not None:
            self._odb_loader.close()


def _info_of(batch: Any) -> ODBStepInfo:
    info = batch[STEP_INFO_KEY]
    assert isinstance(info, ODBStepInfo)
    return info


class ODBTrainer(ODBTrainerMixin, Trainer):
    """`transformers.Trainer` with odb's batches: see `ODBTrainerMixin`."""
