"""Colossal-AI: training through a Booster, with the plugins for data parallelism and ZeRO."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from odb.errors import IntegrationError
from odb.info import ODBStepInfo
from odb.integrations.base import require
from odb.integrations.progress import Progress
from odb.integrations.steps import StepLoop


class ColossalAILoop(StepLoop):
    """The steps of a loader, through Colossal-AI's Booster.

        booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="bf16", max_norm=1.0))
        model, optimizer, *_ = booster.boost(model, optimizer)
        loop = ColossalAILoop(booster, model, optimizer, loader)
        for epoch in range(epochs):
            for batch, info in loop:
                loop.backward(model(**batch).loss)
                if loop.step():
                    schedule.step()

    Pass `boost` only the model and the optimizer, not the loader. Where the plugin has `no_sync`,
    gradients cross between ranks in the last step of a block only. The loop zeroes gradients after
    the optimizer's step.

    model, optimizer: what `booster.boost` returned. clip_norm: clip gradients to this norm before
    the optimizer's step, for TorchDDPPlugin; ZeRO and Gemini plugins take `max_norm` themselves.
    progress: counts, and may limit, what is trained on.

    Raises IntegrationError for a plugin or a setting that cannot train with odb exactly, see
    `check_booster`, and MissingDependencyError without colossalai.
    """

    def __init__(
        self,
        booster: Any,
        model: Any,
        optimizer: Any,
        loader: object,
        *,
        clip_norm: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        check_booster(booster, model, optimizer)
        plugin = type(booster.plugin).__name__
        super().__init__(loader, range(dist.get_world_size()), plugin, progress)
        if clip_norm is not None and not _is(booster.plugin, "TorchDDPPlugin"):
            raise IntegrationError(
                f"{plugin} clips gradients itself, as each rank holds a part of them: pass it "
                "max_norm= in place of clip_norm="
            )
        if self.accumulation_steps > 1 and not _accumulates(booster.plugin):
            raise IntegrationError(
                "GeminiPlugin keeps the gradients of one backward only: build it with "
                "enable_gradient_accumulation=True, as this loader accumulates over "
                f"{self.accumulation_steps} steps"
            )
        self.booster = booster
        self.model = model
        self.optimizer = optimizer
        self.clip_norm = clip_norm

    def _around(self, info: ODBStepInfo) -> AbstractContextManager[Any]:
        if info.last_in_block or not self.booster.plugin.support_no_sync():
            return nullcontext()
        context: AbstractContextManager[Any] = self.booster.no_sync(self.model, self.optimizer)
        return context

    def _backward(self, scaled: Any) -> None:
        self.booster.backward(scaled, self.optimizer)

    def _step(self, info: ODBStepInfo) -> bool:
        if not info.last_in_block:
            return False
        if self.clip_norm is not None:
            self.optimizer.clip_grad_by_norm(self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True


def check_booster(booster: Any, model: Any, optimizer: Any) -> None:
    """Raise IntegrationError if this booster cannot train with odb exactly.

    Refused are: a booster without a plugin, which averages nothing over ranks; plugins with
    pipelines or experts, which pull batches themselves or average over other ranks; Gemini with
    tensor parallelism; a model or an optimizer that is not boosted.
    """
    interface = require("colossalai.interface", "colossalai")
    if not isinstance(booster, require("colossalai.booster", "colossalai").Booster):
        raise IntegrationError(f"a {type(booster).__name__} is no colossalai Booster")
    plugin = booster.plugin
    if plugin is None:
        raise IntegrationError(
            "this Booster has no plugin, so that gradients would not be averaged over ranks: pass "
            "plugin=TorchDDPPlugin(), LowLevelZeroPlugin(...) or GeminiPlugin(...)"
        )
    if not any(_is(plugin, name) for name in _PLUGINS):
        raise IntegrationError(
            f"{type(plugin).__name__} is not among the plugins whose averages odb knows: "
            f"{', '.join(_PLUGINS)}"
        )
    if getattr(plugin, "tp_size", 1) > 1:
        raise IntegrationError(
            f"{type(plugin).__name__} with tensor parallelism averages over other ranks than those "
            "that see different samples: build it with tp_size=1"
        )
    for value, kind, name in (
        (model, interface.ModelWrapper, "model"),
        (optimizer, interface.OptimizerWrapper, "optimizer"),
    ):
        if not isinstance(value, kind):
            raise IntegrationError(
                f"this {name} is a bare {type(value).__name__}: pass what booster.boost(model, "
                "optimizer) returned"
            )


_PLUGINS = ("TorchDDPPlugin", "LowLevelZeroPlugin", "GeminiPlugin")


def _is(plugin: Any, name: str) -> bool:
    plugins = require("colossalai.booster.plugin", "colossalai")
    return isinstance(plugin, getattr(plugins, name))


def _accumulates(plugin: Any) -> bool:
    if not _is(plugin, "GeminiPlugin"):
        return True
    return bool(plugin.gemini_config["enable_gradient_accumulation"])
