"""`DistributedDataParallel`: accumulation without needless exchanges, and training under `Join`.

DDP averages gradients over its ranks, which is what `info.loss_scale` is made for. It needs no
adapter; this module helps where it is easy to go wrong. See docs/trainers/ddp.md.

    ddp.check(model, loader)
    for batch in loader:
        info = odb.pop_step_info(batch)
        with ddp.accumulate(model, info):
            (model(**batch).loss * info.loss_scale).backward()
        if info.last_in_block:
            optimizer.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from odb.errors import IntegrationError
from odb.info import ODBStepInfo
from odb.integrations.base import Facts, check_exact, check_idles

__all__ = ["KeepAlike", "accumulate", "check", "joined"]


def check(model: object, loader: object) -> None:
    """Raise IntegrationError unless training this model with this loader gives the exact gradient:
    it is a DDP model over the very ranks that the loader aligns, and the loader scales the loss and
    idles in step. (With `idle="stop"` use `joined`, which checks the rest.)
    """
    check_idles(_check_ranks(model, loader), "DistributedDataParallel without Join (see `joined`)")


def _check_ranks(model: object, loader: object) -> Facts:
    ranks = dist.get_process_group_ranks(_ddp(model).process_group)
    return check_exact(loader, ranks, "DistributedDataParallel")


def accumulate(model: DistributedDataParallel, info: ODBStepInfo) -> AbstractContextManager[None]:
    """Forward and backward go into this: gradients are exchanged in the last step of a block only.

    The other steps of the block only add to the gradients of their rank. Idle steps go through it
    like any other. With `static_graph=True`, which torch fails at in `no_sync`, they are exchanged
    in every step, which adds up to the same. Raises IntegrationError if `model` is no DDP model.
    """
    ddp = _ddp(model)
    return nullcontext() if info.last_in_block or ddp.static_graph else ddp.no_sync()


class Stateful(Protocol):
    """An optimizer, a learning-rate scheduler, a `Progress`."""

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Become what another one was."""


def joined(model: DistributedDataParallel, loader: object, *stateful: Stateful) -> Join:
    """The context for one epoch of a loader with `idle="stop"`, whose ranks end at different steps.

        with ddp.joined(model, loader, optimizer):
            for batch in loader:
                ...

    It is torch's `Join` in the mode in which the gradient stays exact, and it makes what changes
    with each step (optimizer, schedulers, `Progress`) the same on all ranks at the end: see
    `KeepAlike`. Raises IntegrationError as `check` does, and for a loader with `idle="pad"`, whose
    ranks end together and need no Join.
    """
    if _check_ranks(model, loader).idles:
        raise IntegrationError(
            'this loader has idle="pad": all its ranks end at the same step, and there is nothing '
            'to join. Train without Join, or build the loader with idle="stop"'
        )
    return Join([model, KeepAlike(model, *stateful)], divide_by_initial_world_size=True)


class KeepAlike(Joinable):
    """Makes optimizers, schedulers and the like the same on all ranks when all have joined.

    A rank that has joined takes no more optimizer steps. At the end DDP gives it the parameters of
    the rank that went on longest, but its momentum, its step counts and its learning rate stay
    behind, and in the next epoch the ranks would drift apart without a word. This sends them, too.

    Pass it to `torch.distributed.algorithms.Join` behind the model that it belongs to. Raises
    IntegrationError there for `divide_by_initial_world_size=False`, with which the average is over
    fewer and fewer ranks, while loss scales count on all of them.
    """

    def __init__(self, model: DistributedDataParallel, *stateful: Stateful) -> None:
        super().__init__()
        self._model = _ddp(model)
        self._stateful = stateful

    def join_hook(self, **kwargs: Any) -> JoinHook:
        if not kwargs.get("divide_by_initial_world_size", True):
            raise IntegrationError(
                "Join with divide_by_initial_world_size=False averages over the ranks that are "
                "left, but odb's loss scales need the average over all: leave it out"
            )
        return _SendState(self.join_process_group, self.join_device, self._stateful)

    @property
    def join_device(self) -> torch.device:
        device = self._model.join_device
        assert isinstance(device, torch.device)
        return device

    @property
    def join_process_group(self) -> Any:
        return self._model.join_process_group


class _SendState(JoinHook):
    """Runs once on every rank, when all have joined."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, stateful: tuple[Stateful, ...]
    ) -> None:
        self._group = group
        self._device = device
        self._stateful = stateful

    def post_hook(self, is_last_joiner: bool) -> None:
        own = dist.get_rank()
        last = torch.tensor([own if is_last_joiner else -1], device=self._device)
        dist.all_reduce(last, op=dist.ReduceOp.MAX, group=self._group)
        for one in self._stateful:
            self._send(one, int(last))

    def _send(self, one: Stateful, source: int) -> None:
        """Tensors go by themselves: pickled with the rest, they would be in memory three times."""
        is_source = dist.get_rank() == source
        tensors: list[torch.Tensor] = []
        skeleton = [_map(one.state_dict(), partial(_place, tensors)) if is_source else None]
        dist.broadcast_object_list(skeleton, source, group=self._group, device=self._device)
        if is_source:
            for tensor in tensors:
                dist.broadcast(tensor.to(self._device), source, group=self._group)
        else:
            one.load_state_dict(_map(skeleton[0], partial(self._received, source)))

    def _received(self, source: int, value: Any) -> Any:
        if not isinstance(value, _Place):
            return value
        tensor = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        dist.broadcast(tensor, source, group=self._group)
        return tensor.to("cpu") if value.on_cpu else tensor


class _Place(NamedTuple):
    """Stands for a tensor that comes by itself."""

    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool


def _place(tensors: list[torch.Tensor], value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    tensors.append(value.contiguous())
    return _Place(value.shape, value.dtype, value.device.type == "cpu")


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same containers with changed leaves, in the same order on every rank."""
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(item, change) for item in value)
    return change(value)


def _ddp(model: object) -> DistributedDataParallel:
    if isinstance(model, DistributedDataParallel):
        return model
    raise IntegrationError(
        f"a {type(model).__name__} is no DistributedDataParallel model: wrap it first, and pass "
        "the wrapped one"
    )
