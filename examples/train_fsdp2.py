"""FSDP2 (`fully_shard`) with odb, on two CPU processes:

    torchrun --nproc-per-node 2 examples/train_fsdp2.py

A small transformer, sharded over the ranks, reads the functions of Python's own `email` and
`json` packages as bytes. Gradients are added up over two steps for one step of the optimizer.
The training ends after a number of samples, not of steps; its learning rate follows the samples
seen, and within that the label tokens of each block.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import odb
from odb.demo.corpus import extract_functions, standard_library
from odb.demo.model import CausalTransformer, ModelSize
from odb.integrations import fsdp2
from odb.integrations.progress import Progress
from odb.integrations.schedule import ScaledByBlock, by_samples, warmup_cosine

LONGEST = 256


def samples() -> list[dict[str, torch.Tensor]]:
    """One sample for each function, one byte a token."""
    folders = (standard_library() / name for name in ("email", "json"))
    texts = chain.from_iterable(map(extract_functions, folders))
    tokens = [torch.tensor(list(text.encode()[:LONGEST])) for text in texts]
    return [{"input_ids": t, "labels": t.clone()} for t in tokens]


def main() -> None:
    """Train for two epochs' samples and report what every rank did."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = CausalTransformer(ModelSize(256, width=32))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dataset = samples()
    loader = odb.ODBDataLoader(
        dataset, token_budget=2048, window=256, shuffle=True, accumulation_steps=2
    )
    fsdp2.check(model, loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    progress = Progress(max_samples=2 * len(dataset), samples_per_epoch=len(dataset))
    schedule = by_samples(optimizer, progress, warmup_cosine(100, 2 * len(dataset), floor=0.1))
    scaled = ScaledByBlock(optimizer, base=6_000, rule="sqrt", of="weight")
    while not progress.done:
        loss_sum, weight = 0.0, 0
        for batch in loader:
            info = odb.pop_step_info(batch)
            with fsdp2.accumulate(model, info):
                loss = model(**batch)
                (loss * info.loss_scale).backward()
            progress.update(info)
            if info.last_in_block:
                scaled.update(info)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            loss_sum += loss.item() * info.local_weight
            weight += info.local_weight
            if progress.done:
                break
        print(
            f"epoch {progress.epoch} rank {dist.get_rank()}: {progress.steps} steps, "
            f"{progress.optimizer_steps} of the optimizer, {progress.samples} samples, "
            f"learning rate {schedule.get_last_lr()[0]:.4f}, loss {loss_sum / weight:.3f}",
            flush=True,
        )
    assert progress.samples == 2 * len(dataset), "every function was seen once in each epoch"
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
