"""DeepSpeed, ZeRO 2, with odb, on two CPU processes:

    torchrun --nproc-per-node 2 examples/train_deepspeed.py

A small transformer reads functions of Python's standard library as bytes. Gradients are added up
over two steps for one step of the optimizer; clipping and the warm-up are DeepSpeed's own.
"""

from __future__ import annotations

import os
from itertools import chain

import torch
import torch.distributed as dist

import odb
from odb.demo.corpus import extract_functions, standard_library
from odb.demo.model import CausalTransformer, ModelSize
from odb.integrations.deepspeed import DeepSpeedLoop

LONGEST = 256
EPOCHS = 2
ACCUMULATION = 2

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,  # a placeholder, as batches vary in size
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}},
    "steps_per_print": None,
}


def samples() -> list[dict[str, torch.Tensor]]:
    """One sample for each function of `json` and `email`, one byte a token."""
    folders = (standard_library() / name for name in ("email", "json"))
    texts = chain.from_iterable(map(extract_functions, folders))
    tokens = [torch.tensor(list(text.encode()[:LONGEST])) for text in texts]
    return [{"input_ids": t, "labels": t.clone()} for t in tokens]


def main() -> None:
    """Train for two epochs and report what every rank did."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    bare = CausalTransformer(ModelSize(256, width=32))
    model, *_ = deepspeed.initialize(model=bare, config=CONFIG)
    dataset = samples()
    loader = odb.ODBDataLoader(
        dataset, token_budget=2048, window=256, shuffle=True, accumulation_steps=ACCUMULATION
    )
    loop = DeepSpeedLoop(model, loader)
    for epoch in range(EPOCHS):
        loss_sum, weight = 0.0, 0
        for batch, info in loop:
            loss = model(**{name: value.to(model.device) for name, value in batch.items()})
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
    assert model.global_samples == loop.progress.samples, "DeepSpeed counts the same"
    assert loop.progress.samples == EPOCHS * len(dataset), "every function once in each epoch"
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
