"""FSDP2 (`fully_shard`): accumulation without needless exchanges, and a check of the ranks.

FSDP2 averages gradients over its ranks, which is what `info.loss_scale` is made for. See
docs/trainers/fsdp2.md.

    fsdp2.check(model, loader)
    for batch in loader:
        info = odb.pop_step_info(batch)
        with fsdp2.accumulate(model, info):
            (model(**batch).loss * info.loss_scale).backward()
        if info.last_in_block:
            optimizer.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from odb.errors import IntegrationError, MissingDependencyError
from odb.info import ODBStepInfo
from odb.integrations.base import check_exact, check_idles

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
except ImportError as missing:
    raise MissingDependencyError(
        'FSDP2 came with torch 2.6: pip install "verified-odb[fsdp2]"'
    ) from missing

__all__ = ["accumulate", "check"]


def check(model: nn.Module, loader: object, mesh: DeviceMesh | None = None) -> None:
    """Raise IntegrationError unless training this model with this loader gives the exact gradient:
    it is sharded over the very ranks that the loader aligns, the loader scales the loss, and all
    ranks take all steps (FSDP2 has no Join for `idle="stop"`).

    mesh: the one that `fully_shard` got, of one dimension, or two for hybrid sharding. None: that
    of the model's parameters, which is another one if they are tensor-parallel too.

    A divide factor that was changed with `set_gradient_divide_factor` cannot be seen from outside.
    Leave it alone: the average over all ranks is what the loss scale is made for.
    """
    facts = check_exact(loader, (mesh or _mesh(model)).mesh.flatten().tolist(), "FSDP2")
    check_idles(facts, "FSDP2")


@contextmanager
def accumulate(model: nn.Module, info: ODBStepInfo) -> Iterator[None]:
    """Forward and backward go into this: gradients are exchanged in the last step of a block only.

    The other steps of the block add to whole gradients, which each rank then holds unsharded. To
    save that memory leave this out: exchanging in every step adds up to the same.

    Idle steps go through it like any other. Raises IntegrationError if `model` is not the root that
    `fully_shard` was applied to.
    """
    root = _root(model)
    root.set_requires_gradient_sync(info.last_in_block)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)


def _root(model: nn.Module) -> FSDPModule:
    if isinstance(model, FSDPModule):
        return model
    raise IntegrationError(
        f"fully_shard was not applied to this {type(model).__name__}: apply it to the whole model, "
        "after its layers, and pass the whole model"
    )


def _mesh(model: nn.Module) -> DeviceMesh:
    _root(model)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return parameter.device_mesh
    raise IntegrationError(
        f"this {type(model).__name__} has no sharded parameters: fully_shard ignored all of them"
    )
