"""Tensor, pipeline and context parallelism: all ranks of a data-parallel coordinate see one batch.

With a torch DeviceMesh:

    layout = mesh.Layout.of_mesh(device_mesh, dp="dp")
    loader = layout.loader(lambda group: odb.ODBDataLoader(data, token_budget=4096, group=group))

or with Megatron's groups:

    layout = mesh.Layout.of_groups(
        data=parallel_state.get_data_parallel_group(),
        model=parallel_state.get_model_parallel_group(),
    )

Then every rank iterates `loader` as it would iterate the ODBDataLoader. See docs/trainers/mesh.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from odb.errors import IntegrationError
from odb.integrations.sharing import Build, Coordinate, SharedLoader, Sharing
from odb.loader import ODBDataLoader

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """This rank's place: who sees other samples, and who sees the same.

    group: the ranks, this one among them, that stand for the data-parallel coordinates, each for
        one. It is the right `group=` for a loader on this rank.
    model_group: the ranks of this rank's coordinate (tensor, pipeline, context parallel), who must
        see the same batches; None if it is the only one.
    members: the global ranks of `model_group`, in order. The first one reads in `loader`.
    """

    group: dist.ProcessGroup
    model_group: dist.ProcessGroup | None
    members: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        own = (dist.get_rank(),)
        ranks = dist.get_process_group_ranks(self.model_group) if self.model_group else own
        object.__setattr__(self, "members", tuple(ranks))
        both = set(dist.get_process_group_ranks(self.group)) & set(self.members)
        if both != set(own):
            raise IntegrationError(
                f"rank {own[0]} shares a data-parallel group with other ranks of its own model-"
                f"parallel group ({sorted(both)}): the groups must cross in one rank"
            )

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, dp: str | Sequence[str] = "dp") -> Layout:
        """The layout of a mesh with named dimensions.

        dp: the dimension along which ranks see different samples, or several of them, such as
            ("dp_replicate", "dp_shard") with hybrid sharding. All others are taken to be model
            parallel, context parallelism included, as it divides sequences and not samples.

        With several dimensions of one kind groups are made, so all ranks of the job must call it,
        and the mesh must hold all of them. Raises IntegrationError if the mesh has no such
        dimension, or is too small for that.
        """
        names = mesh.mesh_dim_names
        wanted = (dp,) if isinstance(dp, str) else tuple(dp)
        if names is None or not wanted or not set(wanted) <= set(names):
            raise IntegrationError(
                f"dp={dp!r} names no dimension of this mesh, whose dimensions are {names}: pass "
                "mesh_dim_names to init_device_mesh and dp= to of_mesh"
            )
        others = tuple(name for name in names if name not in wanted)
        group = _group_along(mesh, wanted)
        return cls(group, _group_along(mesh, others) if others else None)

    @classmethod
    def of_groups(cls, data: dist.ProcessGroup, model: dist.ProcessGroup | None = None) -> Layout:
        """The layout of process groups that exist, such as Megatron's.

        data: ranks with different samples. model: ranks that work on the same samples; with
        context parallelism, these must be in it, which Megatron's `get_model_parallel_group` does
        not do. Raises IntegrationError if the two have other ranks than this one in common.
        """
        return cls(data, model)

    def loader(
        self,
        build: Build,
        *,
        timeout: float = 1800.0,
        warn_after: float | None = 60.0,
    ) -> SharedLoader:
        """A loader that one member of each coordinate reads for all of them (collective).

        build: makes the ODBDataLoader; called with `group=` for it, on the reading rank only. So
            the others need neither the dataset nor workers.
        timeout, warn_after: for the exchange with the other members, as for ODBDataLoader.

        Raises what `build` raises, on every member; IntegrationError for a loader over other ranks.
        """
        return SharedLoader(self._coordinate, build, Sharing(True, timeout, warn_after))

    def checked(
        self,
        loader: ODBDataLoader,
        *,
        timeout: float = 1800.0,
        warn_after: float | None = 60.0,
    ) -> SharedLoader:
        """A loader that each member reads for itself, and whose batches are compared (collective).

        loader: built with `group=layout.group` and the same arguments everywhere. Nothing but a
        digest crosses between members, but each of them reads, tokenizes and holds all samples, and
        what the dataset and the collate function do must be the same on each: no draws from a
        generator of their own. Batches that differ raise an IntegrationError on every member.
        """
        sharing = Sharing(False, timeout, warn_after)
        return SharedLoader(self._coordinate, lambda group: loader, sharing)

    @property
    def _coordinate(self) -> Coordinate:
        return Coordinate(self.group, self.model_group, self.members)


def _group_along(mesh: DeviceMesh, names: tuple[str, ...]) -> dist.ProcessGroup:
    """The group of the ranks that differ from this one in these dimensions only."""
    if len(names) == 1:
        return mesh.get_group(names[0])
    if mesh.size() != dist.get_world_size():
        raise IntegrationError(
            f"the dimensions {', '.join(names)} are to be taken together, which needs a group of "
            f"its own, but this mesh holds {mesh.size()} of {dist.get_world_size()} ranks: pass "
            "the whole mesh, or groups that you have to Layout.of_groups"
        )
    rows = _rows(mesh, names)
    found = dist.new_subgroups_by_enumeration(rows, backend="gloo")[0]  # type: ignore[no-untyped-call]
    assert isinstance(found, dist.ProcessGroup)
    return found


def _rows(mesh: DeviceMesh, names: tuple[str, ...]) -> list[list[int]]:
    """The ranks of each such group."""
    dimensions = mesh.mesh_dim_names
    assert dimensions is not None
    along = [dimensions.index(name) for name in names]
    across = [place for place in range(mesh.ndim) if place not in along]
    ranks: torch.Tensor = mesh.mesh.permute(*across, *along)
    size = 1
    for place in along:
        size *= mesh.mesh.shape[place]
    rows: list[list[int]] = ranks.reshape(-1, size).tolist()
    return rows
