"""Checks what a loader is asked for, where it is a matter of single arguments."""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import Any, TypeVar

from odb.errors import ConfigError
from odb.source import LARGEST_CHUNK

Choice = TypeVar("Choice", bound=Enum)

HANDED_ON = frozenset(
    {
        "num_workers",
        "prefetch_factor",
        "persistent_workers",
        "worker_init_fn",
        "generator",
        "multiprocessing_context",
    }
)
"""Arguments of `torch.utils.data.DataLoader` that the inner one gets as they are."""

NOT_TAKEN = {
    "batch_size": "odb decides how many samples a batch holds: leave it out, or pass max_samples=",
    "batch_sampler": "odb forms the batches: pass sampler= for the order of the samples",
    "drop_last": "odb delivers every sample: leave it out",
    "in_order": "odb needs the order of the samples to be reproducible: leave it out",
}
"""Other arguments of `torch.utils.data.DataLoader`, and why they cannot be passed."""


def worker_options(options: dict[str, Any], num_workers: int) -> dict[str, Any]:
    """The arguments of the inner DataLoader. Raises ConfigError for one that cannot be passed."""
    for name, value in options.items():
        if name == "batch_size" and value in (1, None):
            continue
        if name == "drop_last" and not value:
            continue
        if name in NOT_TAKEN:
            raise ConfigError(f"{name}={value!r}: {NOT_TAKEN[name]}")
        if name not in HANDED_ON:
            raise ConfigError(f"ODBDataLoader has no argument {name!r}")
    if not num_workers:
        for name in ("prefetch_factor", "persistent_workers"):
            if options.get(name):
                raise ConfigError(f"{name} needs workers: pass num_workers=1 or more with it")
    handed_on = {name: value for name, value in options.items() if name in HANDED_ON}
    return {"num_workers": num_workers, **handed_on}


def chunk_size(chunk: int | None, window: int) -> int:
    """Samples of a message from a worker. Raises ConfigError."""
    if chunk is None:
        return min(LARGEST_CHUNK, -(-window // 4))
    if chunk < 1:
        raise ConfigError(f"chunk must be a whole number from 1, not {chunk}")
    return chunk


def check_skipping(skip: bool, most: int | None) -> None:
    """Raise ConfigError unless `max_skipped` goes with `on_error`."""
    if most is None:
        return
    if not skip:
        raise ConfigError('max_skipped limits on_error="skip": pass that with it')
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise ConfigError(f"max_skipped must be a whole number from 0, or None, not {most!r}")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    """The value of an argument that has a few. Raises ConfigError for any other."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
    return value


def choice(name: str, value: str, kind: type[Choice]) -> Choice:
    """The same, as a member of an enum."""
    return kind(one_of(name, value, tuple(member.value for member in kind)))


def digest(*settings: object) -> int:
    """A number that differs where these settings differ; it fits into 62 bits."""
    return int.from_bytes(hashlib.sha256(repr(settings).encode()).digest()[:8], "big") >> 2
