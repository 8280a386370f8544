"""Hugging Face Accelerate with odb, on two CPU processes:

    torchrun --nproc-per-node 2 examples/train_accelerate.py

A small transformer reads the functions of Python's own `email` and `json` packages as bytes, in
bfloat16, with gradients added up over two steps, clipped, and a schedule that counts steps of the
optimizer. It is Accelerate's usual loop but for `prepare` and the loss scale.
"""

from __future__ import annotations

from itertools import chain

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

import odb
from odb.demo.corpus import extract_functions, standard_library
from odb.demo.model import CausalTransformer, ModelSize
from odb.integrations.accelerate import prepare

LONGEST = 256


def samples() -> list[dict[str, torch.Tensor]]:
    """One sample for each function, one byte a token."""
    folders = (standard_library() / name for name in ("email", "json"))
    texts = chain.from_iterable(map(extract_functions, folders))
    tokens = [torch.tensor(list(text.encode()[:LONGEST])) for text in texts]
    return [{"input_ids": t, "labels": t.clone()} for t in tokens]


def main() -> None:
    """Train for two epochs, evaluate after each, and report what every rank did."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = CausalTransformer(ModelSize(256, width=32))
    dataset, held_out = samples()[32:], samples()[:32]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=60)
    loader = odb.ODBDataLoader(
        dataset, token_budget=2048, window=256, shuffle=True, accumulation_steps=2
    )
    model, optimizer, scheduler, loader = prepare(accelerator, model, optimizer, scheduler, loader)
    evaluation = accelerator.prepare(
        DataLoader(held_out, batch_size=8, collate_fn=odb.PadCollate())
    )
    for epoch in range(2):
        seen, steps, loss_sum, weight = 0, 0, 0.0, 0
        for batch in loader:
            info = odb.pop_step_info(batch)
            with accelerator.accumulate(model):
                loss = model(**batch)
                accelerator.backward(loss * info.loss_scale)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    steps += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen += info.global_samples
            loss_sum += loss.item() * info.local_weight
            weight += info.local_weight
        assert seen == len(dataset), "every function was seen once"
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics(model(**batch)) for batch in evaluation]
        model.train()
        print(
            f"epoch {epoch} rank {accelerator.process_index}: {steps} steps of the optimizer, "
            f"{seen} samples, learning rate {scheduler.get_last_lr()[0]:.4f}, "
            f"loss {loss_sum / weight:.3f}, held out {torch.stack(losses).mean():.3f}",
            flush=True,
        )
    loader.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
