"""Megatron-core on 2 x 2 ranks: two data-parallel coordinates, each a pipeline of two stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import odb
from odb.integrations.base import version_of
from odb.testing import run_ranks
from tests.trainers import conformance as suite
from tests.trainers.conformance import FLOAT32_CASES, Case, RankResult, Subject
from tests.trainers.cpu_shim import cuda_means_cpu
from tests.trainers.test_megatron import PER_TOKEN, SCALED, SHIM, needs_megatron, said
from tests.trainers.verdicts import write_verdicts


def build_stage(way: str) -> Any:
    """One of two pipeline stages: the last holds the head and the loss."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType
    from megatron.core.transformer import MegatronModule, TransformerConfig

    class Stage(MegatronModule):  # type: ignore[misc]
        def __init__(self, config: TransformerConfig) -> None:
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            self.share_embeddings_and_output_weights = False
            self.bare = suite.make_model()
            self.first = self.pre_process = parallel_state.is_pipeline_first_stage()
            unused = (
                (self.bare.head,) if self.first else (self.bare.embed, self.bare.up, self.bare.down)
            )
            for module in unused:
                module.requires_grad_(False)
            self.received: Any = None

        def set_input_tensor(self, tensor: Any) -> None:
            self.received = tensor[0] if isinstance(tensor, list) else tensor

        def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> Any:
            if self.first:
                hidden = self.bare.embed(input_ids)
                return hidden + self.bare.down(torch.tanh(self.bare.up(hidden)))
            logits = self.bare.head(self.received)
            return nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
            )

    config = TransformerConfig(
        num_layers=2,
        hidden_size=suite.WIDTH,
        num_attention_heads=1,
        calculate_per_token_loss=way == PER_TOKEN,
        finalize_model_grads_func=finalize_model_grads,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # Megatron asks for it, experts or not
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=False,
    )
    return DistributedDataParallel(config, DistributedDataParallelConfig(), Stage(config))


def train_in_stages(rank: int, case: Case, way: str) -> RankResult:
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from odb.integrations.megatron import MegatronBlocks
    from odb.integrations.mesh import Layout

    layout = Layout.of_groups(
        data=parallel_state.get_data_parallel_group(),
        model=parallel_state.get_model_parallel_group(),
    )
    seat = parallel_state.get_data_parallel_rank()
    loader = layout.loader(lambda group: suite.make_loader(case, seat, group=group))
    model = build_stage(way)
    settings = {"optimizer": "sgd", "lr": 0.1, "sgd_momentum": 0.5, "weight_decay": 0.0}
    optimizer = get_megatron_optimizer(OptimizerConfig(clip_grad=0.0, **settings), [model])
    counter = suite.StepCounter(optimizer.chained_optimizers[0].optimizer)
    blocks = MegatronBlocks(model, loader)

    def forward_step(data_iterator: Any, module: Any) -> Any:
        batch, info = next(data_iterator)
        return module(**batch), lambda mean: blocks.loss(mean, info, {})

    infos: list[odb.ODBStepInfo] = []
    for _ in range(case.epochs):
        for block in blocks:
            infos.extend(info for _, info in block.steps)
            model.zero_grad_buffer()
            optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=block.iterator(),
                model=model,
                num_microbatches=block.microbatches,
                seq_length=block.longest,
                micro_batch_size=1,
                forward_only=False,
            )
            optimizer.step()
    loader.close()
    parameters = suite.parameters_of(model.module)
    first = parallel_state.is_pipeline_first_stage()
    own = {name: p for name, p in parameters.items() if name.startswith("head") != first}
    stages: list[Any] = [None, None]
    dist.all_gather_object(stages, own, group=parallel_state.get_pipeline_model_parallel_group())
    return RankResult(stages[0] | stages[1], counter.steps, infos)


def work_in_stages(rank: int, world_size: int) -> dict[str, Any]:
    from megatron.core import parallel_state

    from odb.integrations.megatron import MegatronBlocks

    # As in a mesh of (data, pipeline): the stages of a pipeline are next to each other.
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, order="pp-tp-cp-ep-dp")
    # (First stages are in one group more than later ones: see `odb.groups`.)
    with cuda_means_cpu():
        model = build_stage(SCALED)
        loader = odb.ODBDataLoader(
            [{"input_ids": [1]}],
            token_budget=8,
            group=parallel_state.get_data_parallel_group(),
        )
        found: dict[str, Any] = {
            "bare loader": said(lambda: MegatronBlocks(model, loader)),
        }
        for way in (SCALED, PER_TOKEN):
            found[way] = {case: train_in_stages(rank, case, way) for case in FLOAT32_CASES}
    return found


@needs_megatron
def test_pipelines_see_the_same_batches_and_conform() -> None:
    """Two data-parallel coordinates, each a pipeline of two stages."""
    ranks = run_ranks(work_in_stages, 4, start_method="fork", timeout=100)
    for way in (SCALED, PER_TOKEN):
        name = f"Megatron-core, {way}, 2 stages"
        stages = Subject(name, version_of("megatron-core"), SHIM, extra_lines=5)
        verdicts = [
            suite.judge(stages, case, [rank[way][case] for rank in ranks], members=2)
            for case in FLOAT32_CASES
        ]
        write_verdicts(name, verdicts)
    assert all("mesh.Layout.of_groups" in rank["bare loader"] for rank in ranks)
