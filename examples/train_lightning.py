"""Lightning with odb, on two CPU processes:

    torchrun --nproc-per-node 2 examples/train_lightning.py

A small transformer reads the functions of Python's own `email` and `json` packages as bytes, with
gradients added up over two steps.
"""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

import odb
from odb.demo.corpus import extract_functions, standard_library
from odb.demo.model import CausalTransformer, ModelSize
from odb.integrations.lightning import LightningLoader, ODBCallback

LONGEST = 256


def samples() -> list[dict[str, torch.Tensor]]:
    """One sample for each function, one byte a token."""
    folders = (standard_library() / name for name in ("email", "json"))
    texts = chain.from_iterable(map(extract_functions, folders))
    tokens = [torch.tensor(list(text.encode()[:LONGEST])) for text in texts]
    return [{"input_ids": t, "labels": t.clone()} for t in tokens]


class Reader(LightningModule):
    """A language model over bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = CausalTransformer(ModelSize(256, width=32))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        info = odb.pop_step_info(batch)
        loss: torch.Tensor = self.model(**batch)
        return loss * info.loss_scale

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        size = len(batch["input_ids"])
        self.log("held out", self.model(**batch), batch_size=size, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["odb/loss_step"]
        print(f"epoch {self.current_epoch} rank {self.global_rank}: loss {loss:.3f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train for two epochs, validate after each, and report what every rank did."""
    dataset, held_out = samples()[32:], samples()[:32]
    counts = ODBCallback()
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[counts],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = LightningLoader(
        odb.ODBDataLoader(
            dataset, token_budget=2048, window=256, shuffle=True, accumulation_steps=2
        )
    )
    evaluation = DataLoader(held_out, batch_size=8, collate_fn=odb.PadCollate())
    trainer.fit(Reader(), loader, evaluation)
    loader.close()
    assert counts.samples == 2 * len(dataset), "every function was seen once in each epoch"
    print(
        f"rank {trainer.global_rank}: {trainer.global_step} steps of the optimizer, "
        f"{counts.samples} samples, held out {trainer.callback_metrics['held out']:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
