"""Megatron-core: blocks of micro-batches for its schedules, normalized over all label tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from odb.errors import IntegrationError
from odb.info import ODBStepInfo
from odb.integrations.base import check_exact, check_idles, require
from odb.integrations.sharing import SharedLoader


class MegatronBlocks:
    """The blocks of a loader; each is one call of `forward_backward_func` and one optimizer step.

        blocks = MegatronBlocks(model, loader)

        def forward_step(data_iterator, model):
            batch, info = next(data_iterator)
            loss = model(**batch)                      # the mean over the batch's labels
            return loss, lambda loss: blocks.loss(loss, info, {"lm loss": loss.detach()})

        for block in blocks:                           # an epoch
            forward_backward_func(
                forward_step_func=forward_step, model=model, forward_only=False,
                data_iterator=block.iterator(), num_microbatches=block.microbatches,
                seq_length=block.longest, micro_batch_size=1,
            )
            optimizer.step()
            scheduler.step(increment=block.samples)

    model: a Megatron module, or the list of a rank's chunks. loader: an `ODBDataLoader` with
    `group=parallel_state.get_data_parallel_group()`; with tensor or pipeline parallelism what
    `odb.integrations.mesh.Layout` makes of one, so that all ranks that share samples see the same.

    Raises IntegrationError if the configuration of the model would make gradients wrong (see
    `check_config`), or if the loader is for other ranks; MissingDependencyError without
    megatron-core.
    """

    def __init__(self, model: Any, loader: Any) -> None:
        utils = require("megatron.core.utils", "megatron", package="megatron-core")
        state = require("megatron.core.parallel_state", "megatron", package="megatron-core")
        if not state.model_parallel_is_initialized():
            raise IntegrationError(
                "Megatron's groups do not exist yet: call initialize_model_parallel() first"
            )
        chunks = model if isinstance(model, list) else [model]
        self.config = utils.get_model_config(chunks[0])
        check_config(self.config)
        _check_loader(loader, state)
        self.loader = loader

    def __iter__(self) -> Iterator[Block]:
        """An epoch's blocks. Raises IntegrationError if one was not taken exactly."""
        held: list[tuple[Any, ODBStepInfo]] = []
        for batch, info in self.loader.steps():
            held.append((batch, info))
            if info.last_in_block:
                block = Block(tuple(held))
                held = []
                yield block
                block.check_taken(stages=self.config.pipeline_model_parallel_size)

    def loss(self, mean: torch.Tensor, info: ODBStepInfo, log: Any) -> tuple[Any, ...]:
        """What `loss_func` returns to the schedule, for either of Megatron's normalizations.

        mean: the mean loss over the labels of the batch. log: handed on as it is, to what
        `forward_backward_func` returns.
        """
        if self.config.context_parallel_size > 1:
            raise IntegrationError(
                "with context parallelism a rank sees a part of each sequence: return its own sum "
                "of losses and count of labels from loss_func, and calculate_per_token_loss=True "
                "makes the exact mean of them"
            )
        if self.config.calculate_per_token_loss:
            # Megatron adds up sums and counts over micro-batches and ranks, and divides once.
            tokens = torch.tensor(info.local_weight, dtype=torch.int, device=mean.device)
            return mean * info.local_weight, tokens, log
        # The schedule divides by the number of micro-batches, which the scale has counted in.
        return mean * (info.loss_scale * info.block_steps), log


@dataclass(frozen=True)
class Block:
    """The micro-batches of one step of the optimizer, as (batch, info).

    All counts are of all data-parallel ranks together, except `microbatches` and `longest`.
    """

    steps: tuple[tuple[Any, ODBStepInfo], ...]
    _given: list[MicroBatches] = field(default_factory=list, repr=False, compare=False)

    @property
    def microbatches(self) -> int:
        """What to pass as `num_microbatches`; the last block of an epoch may have fewer."""
        return len(self.steps)

    @property
    def longest(self) -> int:
        """The longest row of this rank's batches, padding included; 0 without `input_ids`."""
        rows = (batch.get("input_ids") for batch, _ in self.steps if isinstance(batch, dict))
        return max((row.shape[-1] for row in rows if isinstance(row, torch.Tensor)), default=0)

    @property
    def samples(self) -> int:
        """What an `OptimizerParamScheduler` counts: pass it as `increment`."""
        return self.steps[0][1].block_samples

    @property
    def tokens(self) -> int:
        """Costs, as `cost_fn` counts them."""
        return self.steps[0][1].block_tokens

    @property
    def weight(self) -> int:
        """Label tokens, unless `loss_weight_fn` says otherwise."""
        return self.steps[0][1].block_weight

    def iterator(self) -> MicroBatches:
        """What to pass as `data_iterator`."""
        given = MicroBatches(self.steps)
        self._given.append(given)
        return given

    def iterators(self, chunks: int) -> list[MicroBatches]:
        """What to pass as `data_iterator` to the interleaved schedule: one for each model chunk."""
        return [self.iterator() for _ in range(chunks)]

    def check_taken(self, stages: int) -> None:
        """Raise IntegrationError unless every iterator was used up. With more than one pipeline
        stage, those in the middle may leave it alone."""
        for given in self._given:
            if given.taken != self.microbatches and (given.taken or stages == 1):
                raise IntegrationError(
                    f"of {self.microbatches} micro-batches {given.taken} were taken: call "
                    "next(data_iterator) once in every forward step, and pass "
                    "num_microbatches=block.microbatches"
                )
        if not self._given:
            raise IntegrationError(
                "a block was skipped: pass block.iterator() as data_iterator and "
                "num_microbatches=block.microbatches to forward_backward_func"
            )


class MicroBatches:
    """Iterates over the (batch, info) of a block once; `taken` counts."""

    def __init__(self, steps: tuple[tuple[Any, ODBStepInfo], ...]) -> None:
        self._steps = steps
        self.taken = 0

    def __iter__(self) -> MicroBatches:
        return self

    def __next__(self) -> tuple[Any, ODBStepInfo]:
        if self.taken == len(self._steps):
            # Not StopIteration, which Megatron would meet somewhere in its schedule.
            raise IntegrationError(
                f"this block has {len(self._steps)} micro-batches, and one more was asked for: "
                "pass num_microbatches=block.microbatches"
            )
        self.taken += 1
        return self._steps[self.taken - 1]


def check_config(config: Any) -> None:
    """Raise IntegrationError, naming the switch, if gradients would be wrong with this config.

    Refused are: no `finalize_model_grads_func`, as gradients would not cross ranks; pipeline
    parallelism without `variable_seq_lengths`, as batches differ in shape; context parallelism
    without `calculate_per_token_loss`, as a mean over a part of a sequence is no mean over labels.
    """
    if config.finalize_model_grads_func is None:
        raise IntegrationError(
            "gradients would not be averaged over ranks: set finalize_model_grads_func to "
            "megatron.core.distributed.finalize_model_grads"
        )
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        raise IntegrationError(
            "pipeline stages exchange tensors of one shape, but micro-batches of odb differ: set "
            "variable_seq_lengths=True"
        )
    if config.context_parallel_size > 1 and not config.calculate_per_token_loss:
        raise IntegrationError(
            "ranks of context parallelism hold different numbers of labels: set "
            "calculate_per_token_loss=True, and return your own sums and counts"
        )


def _check_loader(loader: Any, state: Any) -> None:
    ranks = dist.get_process_group_ranks(state.get_data_parallel_group())
    shares = max(
        dist.get_world_size(state.get_model_parallel_group()),
        state.get_context_parallel_world_size(),
    )
    if shares > 1 and not isinstance(loader, SharedLoader):
        raise IntegrationError(
            "with model parallelism several ranks must see the same batches: build "
            "the loader with odb.integrations.mesh.Layout.of_groups(data=parallel_state."
            "get_data_parallel_group(), model=parallel_state.get_model_parallel_group()).loader()"
        )
    check_idles(check_exact(loader, ranks, "Megatron"), "Megatron")
