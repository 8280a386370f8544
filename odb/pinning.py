"""Puts batches into page-locked memory, from which copies to a GPU are fast and asynchronous."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch


class Pinner:
    """Pins what a driver thread makes, for the device that was current where this was made."""

    def __init__(self, device: int) -> None:
        self._device = device

    @classmethod
    def for_this_thread(cls) -> Pinner | None:
        """A pinner for the current CUDA device; None, with PyTorch's usual warning, without one."""
        if not torch.cuda.is_available():
            warnings.warn(
                "pin_memory=True has no effect: there is no CUDA device here", stacklevel=4
            )
            return None
        return cls(torch.cuda.current_device())

    def pin(self, batch: Any) -> Any:
        """The batch with every tensor in it pinned."""
        # A new thread starts on device 0, and would open a context there on every rank.
        if torch.cuda.current_device() != self._device:
            torch.cuda.set_device(self._device)
        return pinned(batch)


def pinned(value: Any) -> Any:
    """The value with every tensor in it, and whatever has `pin_memory()`, pinned."""
    if hasattr(value, "pin_memory"):
        return value.pin_memory()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(pinned(item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(pinned(item) for item in value)
    if isinstance(value, Mapping):
        if type(value) is dict:
            return {key: pinned(item) for key, item in value.items()}
        result: Any = copy.copy(value)
        for key in result:
            result[key] = pinned(result[key])
        return result
    return value
