"""Plain DistributedDataParallel with odb, on two CPU processes:

    torchrun --nproc-per-node 2 examples/train_ddp.py

The samples are the functions of Python's own `json`, `email` and `asyncio` packages, as bytes: few
are long, most are short. Every rank takes the same number of steps, and every function is seen once
per epoch. Gradients are added up over two steps for one step of the optimizer, and cross from rank
to rank once for it.
"""

from __future__ import annotations

import ast
import asyncio
import email
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import odb
from odb.integrations import ddp

LONGEST = 1024


class Functions(Dataset[dict[str, torch.Tensor]]):
    """The source of every function, one byte a token."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        for package in (json, email, asyncio):
            assert package.__file__ is not None
            for path in sorted(Path(package.__file__).parent.glob("*.py")):
                source = path.read_text()
                for node in ast.walk(ast.parse(source)):
                    if isinstance(node, ast.FunctionDef):
                        lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                        self.texts.append("\n".join(lines))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor(list(self.texts[index].encode()[:LONGEST]), dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens.clone()}


class Model(nn.Module):
    """A recurrent byte model. Its loss is a mean over the labels, as odb's loss scale expects."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.rnn = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        logits = self.head(self.rnn(self.embed(input_ids))[0])
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )


def main() -> None:
    """Train for two epochs and report what every rank did."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dataset = Functions()
    loader = odb.ODBDataLoader(
        dataset, token_budget=4096, window=256, shuffle=True, num_workers=1, accumulation_steps=2
    )
    ddp.check(model, loader)
    for epoch in range(2):
        samples, loss_sum, weight = 0, 0.0, 0
        for batch in loader:
            info = odb.pop_step_info(batch)
            with ddp.accumulate(model, info):
                loss = model(**batch)
                (loss * info.loss_scale).backward()
            if info.last_in_block:
                optimizer.step()
                optimizer.zero_grad()
            samples += info.global_samples
            loss_sum += loss.item() * info.local_weight
            weight += info.local_weight
        assert samples == len(dataset) - len(loader.stats.filtered)
        print(
            f"epoch {epoch} rank {rank}: {loader.stats.steps} steps, {samples} samples on all "
            f"ranks, padding {loader.stats.padding:.1%}, loss {loss_sum / weight:.3f}",
            flush=True,
        )
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
