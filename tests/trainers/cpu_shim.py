"""For tests only: lets Megatron-core, which asks for CUDA devices by name, run on CPUs, and
Hugging Face Accelerate FSDP and DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class CudaMeansCpu(TorchFunctionMode):
    """Every tensor that is to be made on, or moved to, a CUDA device is on the CPU instead."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        named = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **named)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value


@contextmanager
def cuda_means_cpu() -> Iterator[None]:
    """Within it, code that names CUDA devices runs on the CPU; `torch.cuda` itself is as it was,
    but that there is a current device, and nothing to wait for on it."""
    current, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    try:
        with CudaMeansCpu():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = current, synchronize


@contextmanager
def accelerate_on_cpus() -> Iterator[None]:
    """Within it, Hugging Face Accelerate takes CPUs with Gloo for accelerators of another make, as
    it offers FSDP and DeepSpeed on those only."""
    from accelerate import DistributedType
    from accelerate.state import PartialState

    def prepare(*_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_XPU

    with (
        mock.patch.object(PartialState, "_prepare_backend", prepare),
        mock.patch.dict(os.environ, ACCELERATE_TORCH_DEVICE="cpu"),
    ):
        yield
