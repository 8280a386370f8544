"""What the adapters share: optional imports, and the checks that do not depend on a framework."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from odb.equip import EquippedDataLoader
from odb.errors import IntegrationError, MissingDependencyError
from odb.groups import GroupChoice, global_rank, seat_in
from odb.loader import ODBDataLoader
from odb.stats import LoaderStats


def require(module: str, extra: str, *, package: str | None = None) -> Any:
    """Import an optional package's module, such as `require("accelerate", "accelerate")`.

    extra: of verified-odb that installs it. package: its name on PyPI, if it is not the module's.
    Raises MissingDependencyError if it is not installed, or if it fails to import; the original
    error is chained.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module.partition(".")[0]
        absent = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        why = "is not installed" if absent else f"cannot be imported ({error})"
        raise MissingDependencyError(
            f'{name} {why}: pip install "verified-odb[{extra}]"'
        ) from error


def version_of(package: str) -> str:
    """The installed version of a package, such as "1.15.0". Raises MissingDependencyError."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependencyError(f"{package} is not installed") from error


def check_loader(loader: object) -> ODBDataLoader:
    """The odb loader that this is, or that is behind a DataLoader equipped by `odb.apply`.

    Raises IntegrationError for anything else, such as a loader that a framework has wrapped.
    """
    if isinstance(loader, EquippedDataLoader):
        return loader.odb
    if isinstance(loader, ODBDataLoader):
        return loader
    raise IntegrationError(
        f"a {type(loader).__name__} is no odb.ODBDataLoader: pass the loader itself, or one that "
        "odb.apply() has equipped, before a framework wraps it"
    )


class AroundLoader:
    """An object around a loader that a framework takes in its place. loader: the one inside."""

    loader: ODBDataLoader

    @property
    def dataset(self) -> Any:
        """See `ODBDataLoader`."""
        return self.loader.dataset

    @property
    def stats(self) -> LoaderStats:
        """See `ODBDataLoader.stats`."""
        return self.loader.stats

    def set_epoch(self, epoch: int) -> None:
        """See `ODBDataLoader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def close(self) -> None:
        """See `ODBDataLoader.close`."""
        self.loader.close()


class Facts(NamedTuple):
    """What a loader was built with, as far as adapters have to know it. ranks: the global ranks
    that it aligns, in order."""

    ranks: tuple[int, ...]
    accumulation_steps: int
    idles: bool
    scales_loss: bool


def facts_of(loader: object) -> Facts:
    """The facts of a loader, of one equipped by `odb.apply`, or of a mesh's shared one.

    Raises IntegrationError if it is no odb loader, NotDistributedError if it has no process group
    and needs one.
    """
    shared = getattr(loader, "facts", None)  # of `odb.integrations.mesh`: it may read nothing
    if isinstance(shared, Facts):
        return shared
    own = check_loader(loader)
    return Facts(
        ranks=ranks_of(own.group),
        accumulation_steps=own.accumulation_steps,
        idles=own.idle == "pad",
        scales_loss=own.loss_scaling == "exact",
    )


def ranks_of(group: GroupChoice) -> tuple[int, ...]:
    """The global ranks that a loader with this `group=` aligns, in order.

    Raises NotDistributedError as such a loader would.
    """
    if seat_in(group).world_size == 1:
        return (global_rank(),)
    return tuple(dist.get_process_group_ranks(dist.group.WORLD if group == "world" else group))


def check_exact(loader: object, ranks: Sequence[int], who: str) -> Facts:
    """Raise IntegrationError unless the loader aligns exactly these global ranks, over which `who`
    averages gradients, and gives exact loss scales."""
    facts = facts_of(loader)
    if set(facts.ranks) != set(ranks):
        raise IntegrationError(
            f"{who} averages gradients over the ranks {_listed(ranks)}, but the loader aligns the "
            f"ranks {_listed(facts.ranks)}: pass the same process group to both (the loader's is "
            "group=)"
        )
    if not facts.scales_loss:
        raise IntegrationError(
            'this loader was built with loss_scaling="none", so its loss scales are all 1, and '
            f'{who} would average the means of the ranks: build it with loss_scaling="exact"'
        )
    return facts


def check_idles(facts: Facts, who: str) -> None:
    """Raise IntegrationError for `idle="stop"`, where the other ranks would wait for good."""
    if not facts.idles:
        raise IntegrationError(
            f"{who} needs a backward on every rank in every step, but this loader was built with "
            'idle="stop": build it with idle="pad"'
        )


def check_parallelism(holder: Any) -> None:
    """Raise IntegrationError if the `parallelism_config` of an Accelerator, or of a Trainer's
    arguments, has ranks that train one model together. An Accelerator also has it from its
    environment, and a Trainer's from the model that it is given."""
    parallelism = getattr(holder, "parallelism_config", None)
    if parallelism is not None and parallelism.non_data_parallel_size > 1:
        raise IntegrationError(
            "some ranks share their batches (a parallelism_config, or a model that was loaded with "
            "tensor parallelism), which this adapter does not do: see odb.integrations.mesh"
        )


def _listed(ranks: Sequence[int]) -> str:
    ordered = sorted(ranks)
    names = ", ".join(map(str, ordered[:8]))
    return names if len(ordered) <= 8 else f"{names}, ... ({len(ordered)} in all)"
