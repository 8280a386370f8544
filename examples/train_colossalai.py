"""Colossal-AI's Booster with odb, on two CPU processes:

    torchrun --nproc-per-node 2 examples/train_colossalai.py

A small transformer reads functions of Python's standard library as bytes. Gradients are added up
over two steps for one step of the optimizer. On GPUs, put LowLevelZeroPlugin in the place of
TorchDDPPlugin; it refuses to run on a CPU.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin

import odb
from odb.demo.corpus import extract_functions, standard_library
from odb.demo.model import CausalTransformer, ModelSize
from odb.integrations.colossalai import ColossalAILoop

LONGEST = 256
EPOCHS = 2
ACCUMULATION = 2


def samples() -> list[dict[str, torch.Tensor]]:
    """One sample for each function of `json` and `email`, one byte a token."""
    folders = (standard_library() / name for name in ("email", "json"))
    texts = chain.from_iterable(map(extract_functions, folders))
    tokens = [torch.tensor(list(text.encode()[:LONGEST])) for text in texts]
    return [{"input_ids": t, "labels": t.clone()} for t in tokens]


def main() -> None:
    """Train for two epochs and report what every rank did."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    bare = CausalTransformer(ModelSize(256, width=32))
    booster = Booster(plugin=TorchDDPPlugin())
    model, optimizer, *_ = booster.boost(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2))
    dataset = samples()
    loader = odb.ODBDataLoader(
        dataset, token_budget=2048, window=256, shuffle=True, accumulation_steps=ACCUMULATION
    )
    loop = ColossalAILoop(booster, model, optimizer, loader, clip_norm=1.0)
    for epoch in range(EPOCHS):
        loss_sum, weight = 0.0, 0
        for batch, info in loop:
            loss = model(**batch)
            loop.backward(loss)
            loop.step()
            loss_sum += loss.item() * info.local_weight
            weight += info.local_weight
        done = loop.progress
        print(
            f"epoch {epoch} rank {dist.get_rank()}: {done.optimizer_steps} optimizer steps, "
            f"{done.samples} samples, loss {loss_sum / weight:.3f}",
            flush=True,
        )
    assert loop.progress.samples == EPOCHS * len(dataset), "every function once in each epoch"
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
