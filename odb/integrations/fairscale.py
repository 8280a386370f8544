"""FairScale: sharded optimizer state (OSS), and sharded gradients (ShardedDDP, its FSDP)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from odb.errors import IntegrationError
from odb.info import ODBStepInfo
from odb.integrations.base import require
from odb.integrations.progress import Progress
from odb.integrations.steps import StepLoop


class FairScaleLoop(StepLoop):
    """The steps of a loader, through a FairScale model and optimizer.

        model = Model()
        optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)
        model = ShardedDDP(model, optimizer)
        loop = FairScaleLoop(model, optimizer, loader)
        for epoch in range(epochs):
            for batch, info in loop:
                loop.backward(model(**batch).loss)
                loop.step()

    Gradients cross between ranks in the last step of a block only (`no_sync`). The loop sets
    gradients to zero after the optimizer's step, in the way that this model needs; leave out
    `zero_grad()`.

    model: a ShardedDDP, a DistributedDataParallel with an OSS, or FairScale's
    FullyShardedDataParallel with any optimizer. clip_norm: clip gradients to this norm before the
    optimizer's step; it is taken over all shards. progress: counts, and may limit, what is trained
    on.

    Raises IntegrationError if model and optimizer do not go together or average over other ranks
    than the loader's, MissingDependencyError without fairscale.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loader: object,
        *,
        clip_norm: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        group = _group_of(model, optimizer)
        super().__init__(
            loader, dist.get_process_group_ranks(group), type(model).__name__, progress
        )
        self.model = model
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self._sharded_gradients = not isinstance(model, DistributedDataParallel)
        self._kept: frozenset[nn.Parameter] = frozenset()
        if _is(model, "ShardedDataParallel"):
            model.register_forward_hook(self._look_at_gradients)

    def _around(self, info: ODBStepInfo) -> AbstractContextManager[Any]:
        if info.last_in_block or getattr(self.model, "static_graph", False):
            return nullcontext()  # torch fails at a static graph in no_sync
        context: AbstractContextManager[Any] = self.model.no_sync()
        return context

    def _backward(self, scaled: Any) -> None:
        if any(parameter.grad is None for parameter in self._kept):
            raise IntegrationError(
                "ShardedDDP gathers gradients in buffers, and something has set gradients to None, "
                "so that they would not get there: leave out zero_grad(), as this loop zeroes them"
            )
        scaled.backward()

    def _step(self, info: ODBStepInfo) -> bool:
        if not info.last_in_block:
            return False
        if self.clip_norm is not None:
            self._clip(self.clip_norm)
        self.optimizer.step()
        if self._sharded_gradients:
            # Not the optimizer's: it would take ShardedDDP's buffers away from the parameters.
            self.model.zero_grad(set_to_none=False)
            self._kept = frozenset()
            self._look_at_gradients()
        else:
            self.optimizer.zero_grad()
        return True

    def _clip(self, norm: float) -> None:
        if isinstance(self.model, DistributedDataParallel):
            nn.utils.clip_grad_norm_(self.model.parameters(), norm)
        elif _is(self.model, "ShardedDataParallel"):
            self.optimizer.clip_grad_norm(norm)
        else:
            self.model.clip_grad_norm_(norm)

    def _look_at_gradients(self, *_: Any) -> None:
        """Remember who has one: after a forward, all that are in ShardedDDP's buffers."""
        if _is(self.model, "ShardedDataParallel"):
            self._kept |= {p for p in self.model.parameters() if p.grad is not None}


def _is(model: Any, name: str) -> bool:
    return isinstance(model, getattr(require("fairscale.nn", "fairscale"), name))


def _group_of(model: Any, optimizer: Any) -> Any:
    """The group over which gradients are averaged. Raises IntegrationError."""
    if _is(model, "FullyShardedDataParallel"):
        return model.process_group
    sharded = isinstance(optimizer, require("fairscale.optim", "fairscale").OSS)
    if _is(model, "ShardedDataParallel") or isinstance(model, DistributedDataParallel):
        if not sharded:
            raise IntegrationError(
                f"a {type(model).__name__} needs FairScale's OSS as its optimizer here, not a "
                f"{type(optimizer).__name__}; for DistributedDataParallel without FairScale see "
                "odb.integrations.ddp"
            )
        return optimizer.group
    raise IntegrationError(
        f"a {type(model).__name__} is no FairScale model: wrap it in ShardedDataParallel, "
        "FullyShardedDataParallel or torch's DistributedDataParallel first"
    )
