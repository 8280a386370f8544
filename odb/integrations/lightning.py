"""Lightning: an odb loader for `Trainer.fit`, and a callback that checks and counts.

    class Mine(LightningModule):
        def training_step(self, batch, batch_idx):
            info = odb.pop_step_info(batch)
            return self.model(**batch).loss * info.loss_scale

    trainer = Trainer(accumulate_grad_batches=A, callbacks=[ODBCallback()])
    trainer.fit(module, LightningLoader(odb.ODBDataLoader(..., accumulation_steps=A)))

See docs/trainers/lightning.md.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from odb.errors import BatchTypeError, IntegrationError
from odb.info import STEP_INFO_KEY, ODBStepInfo
from odb.integrations.base import AroundLoader, check_exact, check_idles, check_loader, require

require("lightning.pytorch", "lightning", package="lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402


class Ticket:
    """Carries a step's info past Lightning, which rebuilds every dataclass in a batch and refuses
    the frozen ones. `ODBCallback` puts the info in its place."""

    def __init__(self, info: ODBStepInfo) -> None:
        self.info = info


class LightningLoader(AroundLoader):
    """An odb loader as Lightning takes it: an iterable that is no DataLoader, which it neither
    shards nor wraps.

    Batches must be mutable mappings; a BatchTypeError is raised for others. Lightning reads one
    batch ahead, and so knows the last one of an epoch.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = check_loader(loader)

    def __iter__(self) -> Iterator[Any]:
        # A generator: Lightning calls iter() once just to see whether it can, and that must not
        # start an epoch.
        for batch, info in self.loader.steps():
            if not isinstance(batch, MutableMapping):
                raise BatchTypeError(
                    f"the collate function made a {type(batch).__name__}: with Lightning a batch "
                    "must be a mapping, which carries the step's info"
                )
            batch[STEP_INFO_KEY] = Ticket(info)
            yield batch


@dataclass
class _Step:
    """A step under way."""

    info: ODBStepInfo
    optimizer_steps: int


class ODBCallback(Callback):
    """Checks the wiring, hands each step's info on, and counts.

    The `loss_scale` of the info is multiplied by `accumulate_grad_batches` under automatic
    optimization, as Lightning divides the loss by that.

    log_loss: name under which the mean loss over all label tokens of each block is logged, on all
        ranks together, one small all-reduce for each step of the optimizer; None: not at all. An
        epoch's value is the mean over the label tokens of the epoch. Under manual optimization it
        is logged if `training_step` returns the scaled loss (or a mapping with it as "loss").
    samples, tokens: delivered in finished blocks since `fit` began, on all ranks together;
        `samples` is logged, too, as "odb/samples".

    Raises IntegrationError, on all ranks at the same step, for settings that make gradients or
    counts wrong, if `training_step` leaves the info in the batch, and if the optimizer steps
    anywhere else than at the end of a block.
    """

    def __init__(self, log_loss: str | None = "odb/loss") -> None:
        self.log_loss = log_loss
        self.samples = 0
        self.tokens = 0
        self._step: _Step | None = None
        self._block_loss: torch.Tensor | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting anew."""
        self.samples = self.tokens = 0
        self._block_loss = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the settings; a GradientAccumulationScheduler changes them between epochs."""
        self._check(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Put the info into the batch, for `odb.pop_step_info`."""
        ticket = batch.get(STEP_INFO_KEY) if isinstance(batch, MutableMapping) else None
        if not isinstance(ticket, Ticket):
            raise IntegrationError(
                f"this {type(batch).__name__} does not carry a step's info: does a hook such as "
                "on_before_batch_transfer rebuild it? Keep its entry odb.info.STEP_INFO_KEY"
            )
        info = ticket.info
        self._step = _Step(info, trainer.global_step)
        factor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        batch[STEP_INFO_KEY] = replace(info, loss_scale=info.loss_scale * factor)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Check that the step's info was taken, and that the optimizer stepped where it should;
        count and log."""
        assert self._step is not None
        if STEP_INFO_KEY in batch:
            raise IntegrationError(
                f"{type(pl_module).__name__}.training_step has left the step's info in the batch, "
                "and with it the loss scale: call info = odb.pop_step_info(batch) there, and "
                "return loss * info.loss_scale"
            )
        info, before = self._step.info, self._step.optimizer_steps
        stepped = trainer.global_step > before
        if stepped != info.last_in_block:
            raise IntegrationError(
                f"step {info.step} is number {info.block_step + 1} of a block of "
                f"{info.block_steps}, and the optimizer "
                + ("stepped in it" if stepped else "did not step in it")
                + ": it has to step at the end of a block. Under manual optimization, call "
                "optimizer.step() if info.last_in_block, and only then"
            )
        self._add_loss(outputs)
        if info.last_in_block:
            self.samples += info.block_samples
            self.tokens += info.block_tokens
            self._log(trainer, pl_module, info)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any
    ) -> None:
        """Put the info into the batch, if it comes from a LightningLoader."""
        _unwrap(batch)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any
    ) -> None:
        """The same."""
        _unwrap(batch)

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any
    ) -> None:
        """The same."""
        _unwrap(batch)

    def _add_loss(self, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, MutableMapping) else outputs
        if self.log_loss is not None and isinstance(loss, torch.Tensor):
            # What Lightning gives out here has been divided by accumulate_grad_batches.
            loss = loss.detach()
            self._block_loss = loss if self._block_loss is None else self._block_loss + loss

    def _log(self, trainer: Trainer, pl_module: LightningModule, info: ODBStepInfo) -> None:
        pl_module.log("odb/samples", float(self.samples), on_step=True, on_epoch=False)
        if self.log_loss is not None and self._block_loss is not None:
            mean = trainer.strategy.reduce(self._block_loss, reduce_op="mean")
            # As an epoch's value is a mean weighted by the "batch size".
            pl_module.log(
                self.log_loss, mean, on_step=True, on_epoch=True, batch_size=info.block_weight
            )
        self._block_loss = None

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader = trainer.train_dataloader
        if not isinstance(loader, LightningLoader):
            raise IntegrationError(
                f"the training data comes from a {type(loader).__name__}: pass "
                "odb.integrations.lightning.LightningLoader(loader) to fit(), or return it from "
                "train_dataloader()"
            )
        facts = check_exact(loader.loader, range(_replicas(trainer)), "Lightning")
        check_idles(facts, "Lightning")
        if not pl_module.automatic_optimization:
            return
        accumulation = trainer.accumulate_grad_batches
        if facts.accumulation_steps != accumulation:
            raise IntegrationError(
                f"the loader has accumulation_steps={facts.accumulation_steps}, but "
                f"accumulate_grad_batches is {accumulation}: pass the same number to both"
            )
        if accumulation == 1:
            return
        limit = trainer.limit_train_batches
        if isinstance(limit, int) or limit != 1.0:  # 1 is one batch, 1.0 is all of them
            raise IntegrationError(
                f"limit_train_batches={limit}, which fast_dev_run and overfit_batches set, too, "
                "may end an epoch within a block: leave it out, and pass ODBDataLoader(join=False, "
                "quota=...) to shorten epochs"
            )
        if trainer.strategy.handles_gradient_accumulation:
            raise IntegrationError(
                f"{type(trainer.strategy).__name__} decides by itself when the optimizer steps, "
                "which does not fit a shorter last block: use odb.integrations.deepspeed without "
                "Lightning, or accumulation_steps=1"
            )


def _unwrap(batch: Any) -> None:
    ticket = batch.get(STEP_INFO_KEY) if isinstance(batch, MutableMapping) else None
    if isinstance(ticket, Ticket):
        batch[STEP_INFO_KEY] = ticket.info


def _replicas(trainer: Trainer) -> int:
    """Over how many ranks the strategy averages gradients."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return int(kwargs["num_replicas"]) if kwargs else trainer.world_size
