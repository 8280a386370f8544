"""`odb.apply`: an existing DataLoader starts to yield cost-based, aligned batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data import default_collate as torch_default_collate
from torch.utils.data import default_convert as torch_default_convert

from odb.errors import ConfigError
from odb.loader import ODBDataLoader
from odb.session import StepIterator
from odb.stats import LoaderStats


class EquippedDataLoader(DataLoader[Any]):
    """A DataLoader whose iteration is odb's; made by `odb.apply`, never constructed.

    `odb` is the ODBDataLoader behind it.
    """

    odb: ODBDataLoader

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self.odb)

    def __len__(self) -> NoReturn:
        raise TypeError(
            "the number of steps of an epoch is not known before it ends, as batches are formed by "
            "cost; bound training by samples or by max_steps"
        )

    def steps(self) -> StepIterator:
        """See `ODBDataLoader.steps`."""
        return self.odb.steps()

    def set_epoch(self, epoch: int) -> None:
        """See `ODBDataLoader.set_epoch`."""
        self.odb.set_epoch(epoch)

    @property
    def stats(self) -> LoaderStats:
        """See `ODBDataLoader.stats`."""
        return self.odb.stats

    def close(self) -> None:
        """See `ODBDataLoader.close`."""
        self.odb.close()


def apply(dataloader: DataLoader[Any], *, token_budget: int, **options: Any) -> EquippedDataLoader:
    """Equip a DataLoader in place: from now on, iterating it yields odb's batches.

    Dataset, workers, collate function, generator and pinning are taken over; the batch size has no
    meaning any more. A sampler that the user chose (a DistributedSampler, say) is respected as
    this rank's own order; one that DataLoader made by itself of `shuffle=` is replaced by odb's
    sharding, which gives each sample to exactly one rank. PyTorch's default collate function,
    which cannot pad, is replaced by `PadCollate`.

    token_budget and options: as for `ODBDataLoader`; they override what is taken over. Returns the
    same object. Raises ConfigError for a loader with a batch sampler of its own, or of a subclass
    that iterates in its own way (equip it before a framework wraps it).
    """
    if isinstance(dataloader, EquippedDataLoader):
        raise ConfigError("this DataLoader is equipped already; its loader is `dataloader.odb`")
    if type(dataloader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"a {type(dataloader).__name__} iterates in its own way: apply odb to a plain "
            "torch.utils.data.DataLoader, and before a framework wraps it"
        )
    if dataloader.batch_sampler is not None and type(dataloader.batch_sampler) is not BatchSampler:
        raise ConfigError("this DataLoader has a batch_sampler of its own, but odb forms batches")
    taken = _taken_over(dataloader)
    if "sampler" in options:
        taken.pop("shuffle", None)
    if "shuffle" in options:
        taken.pop("sampler", None)
    loader = ODBDataLoader(dataloader.dataset, token_budget=token_budget, **{**taken, **options})
    # Frameworks hold the loader already, so it has to stay the same object. Only this one object
    # becomes an instance of a subclass; no class is changed.
    dataloader.odb = loader
    dataloader.__class__ = EquippedDataLoader
    assert isinstance(dataloader, EquippedDataLoader)
    return dataloader


def _taken_over(dataloader: DataLoader[Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_workers": dataloader.num_workers,
        "pin_memory": dataloader.pin_memory,
        "persistent_workers": dataloader.persistent_workers,
        "worker_init_fn": dataloader.worker_init_fn,
        "generator": dataloader.generator,
    }
    if dataloader.num_workers > 0:
        options["prefetch_factor"] = dataloader.prefetch_factor
        options["multiprocessing_context"] = dataloader.multiprocessing_context
    if dataloader.collate_fn not in (torch_default_collate, torch_default_convert):
        options["collate_fn"] = dataloader.collate_fn
    if not isinstance(dataloader.dataset, IterableDataset):
        if type(dataloader.sampler) is RandomSampler and not dataloader.sampler.replacement:
            options["shuffle"] = True
        elif type(dataloader.sampler) is not SequentialSampler:
            options["sampler"] = dataloader.sampler
    return options
