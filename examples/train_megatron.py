"""Megatron-core with odb, on two processes:

    torchrun --nproc-per-node 2 examples/train_megatron.py

A small transformer reads functions of Python's standard library as bytes; Megatron's DDP, schedule
and optimizer train it. Each step of the optimizer takes two micro-batches of each rank, or what an
epoch has left. Without GPUs it runs under the shim of odb's tests, as Megatron-core asks for CUDA.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MegatronModule, TransformerConfig

import odb
from odb.demo.corpus import extract_functions, standard_library
from odb.demo.model import CausalTransformer, ModelSize
from odb.integrations.megatron import MegatronBlocks

LONGEST = 256
EPOCHS = 2
ACCUMULATION = 2


def samples() -> list[dict[str, torch.Tensor]]:
    """One sample for each function of `json` and `email`, one byte a token."""
    folders = (standard_library() / name for name in ("email", "json"))
    texts = chain.from_iterable(map(extract_functions, folders))
    tokens = [torch.tensor(list(text.encode()[:LONGEST])) for text in texts]
    return [{"input_ids": t, "labels": t.clone()} for t in tokens]


class Model(MegatronModule):
    """A plain model in Megatron's clothes."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.bare = CausalTransformer(ModelSize(256, width=32))

    def set_input_tensor(self, tensor: Any) -> None:
        """Nothing comes from other pipeline stages."""

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.bare(**batch)


def train() -> None:
    """Train for two epochs and report what every rank did."""
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=1,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), Model(config))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), [model])
    dataset = samples()
    loader = odb.ODBDataLoader(
        dataset,
        token_budget=2048,
        window=256,
        shuffle=True,
        accumulation_steps=ACCUMULATION,
        group=parallel_state.get_data_parallel_group(),
    )
    blocks = MegatronBlocks(model, loader)
    forward_backward = get_forward_backward_func()

    def forward_step(data_iterator: Any, module: Any) -> tuple[torch.Tensor, Any]:
        batch, info = next(data_iterator)
        log = (info.local_weight, {})
        return module(**batch), lambda mean: blocks.loss(mean, info, (mean.detach(), *log))

    steps = seen = 0
    for epoch in range(EPOCHS):
        loss_sum, weight = 0.0, 0
        for block in blocks:
            model.zero_grad_buffer()
            optimizer.zero_grad()
            logged = forward_backward(
                forward_step_func=forward_step,
                data_iterator=block.iterator(),
                model=model,
                num_microbatches=block.microbatches,
                seq_length=block.longest,
                micro_batch_size=1,
                forward_only=False,
            )
            optimizer.step()
            steps, seen = steps + 1, seen + block.samples
            loss_sum += sum(float(mean) * tokens for mean, tokens, _ in logged)
            weight += sum(tokens for _, tokens, _ in logged)
        print(
            f"epoch {epoch} rank {dist.get_rank()}: {steps} optimizer steps, "
            f"{seen} samples, loss {loss_sum / weight:.3f}",
            flush=True,
        )
    assert seen == EPOCHS * len(dataset), "every function was seen once in each epoch"
    loader.close()


def main() -> None:
    """Train on GPUs, or under the shim."""
    with_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if with_gpus else "gloo")
    context: Any = nullcontext()
    if not with_gpus:
        sys.path.append(str(Path(__file__).parent.parent))
        from tests.trainers.cpu_shim import cuda_means_cpu

        context = cuda_means_cpu()
    with context:
        train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
