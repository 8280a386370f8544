"""Tensor parallelism and odb, on four CPU processes, two by two:

    torchrun --nproc-per-node 4 examples/train_mesh.py

Two ranks hold the two halves of each feed-forward layer and must see the same batch: one of them
reads, and sends it to the other. The two pairs see different samples of the functions of Python's
own `email` and `json` packages, each function once per epoch.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import odb
from odb.demo.corpus import extract_functions, standard_library
from odb.demo.model import CausalTransformer, ModelSize
from odb.integrations import fsdp2
from odb.integrations.mesh import Layout

LONGEST = 256
HALVED = {"blocks.*.mlp.0": ColwiseParallel(), "blocks.*.mlp.2": RowwiseParallel()}


def build(group: dist.ProcessGroup) -> odb.ODBDataLoader:
    """The loader of a rank that reads; the others never need the data."""
    folders = (standard_library() / name for name in ("email", "json"))
    texts = chain.from_iterable(map(extract_functions, folders))
    tokens = [torch.tensor(list(text.encode()[:LONGEST])) for text in texts]
    samples = [{"input_ids": t, "labels": t.clone()} for t in tokens]
    return odb.ODBDataLoader(samples, token_budget=4096, window=256, shuffle=True, group=group)


def main() -> None:
    """Train for two epochs and report what every rank did."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    layout = Layout.of_mesh(mesh, dp="dp")
    loader = layout.loader(build)
    torch.manual_seed(0)
    model = CausalTransformer(ModelSize(256, width=32))
    parallelize_module(model, mesh["tp"], HALVED)
    fully_shard(model, mesh=mesh["dp"])
    fsdp2.check(model, loader, mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        steps, samples, loss_sum, weight = 0, 0, 0.0, 0
        for batch in loader:
            info = odb.pop_step_info(batch)
            loss = model(**batch)
            (loss * info.loss_scale).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            samples += info.global_samples
            loss_sum += loss.item() * info.local_weight
            weight += info.local_weight
        print(
            f"epoch {epoch} rank {dist.get_rank()} (reads: {loader.loader is not None}): "
            f"{steps} steps, {samples} samples, loss {loss_sum / weight:.6f}",
            flush=True,
        )
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
