"""Who delivered which sample how often: identities are compared, not counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Accounting:
    """The samples of all epochs against those that should have come once in each.

    missing, repeated and unknown hold (epoch, sample) pairs: not delivered in this epoch,
    delivered more than once in it, delivered without being in the dataset.
    """

    samples: int
    epochs: int
    missing: tuple[tuple[int, int], ...]
    repeated: tuple[tuple[int, int], ...]
    unknown: tuple[tuple[int, int], ...]

    @property
    def delivered(self) -> int:
        """Samples that were due and came, each counted once for each epoch."""
        return self.samples * self.epochs - len(self.missing)

    @property
    def exactly_once(self) -> bool:
        """Every sample of the dataset was delivered once in every epoch, and nothing else was."""
        return not (self.missing or self.repeated or self.unknown)

    def __str__(self) -> str:
        """For people: yes, or what is wrong."""
        if self.exactly_once:
            return "yes"
        found = [
            f"{len(pairs):,} {what}"
            for pairs, what in (
                (self.missing, "missing"),
                (self.repeated, "repeated"),
                (self.unknown, "unknown"),
            )
            if pairs
        ]
        return f"no ({', '.join(found)})"


def account(samples: int, epochs: int, delivered: Iterable[tuple[int, int]]) -> Accounting:
    """Compare (epoch, sample) pairs, as all ranks together delivered them, with the dataset.

    The dataset's samples are 0 to `samples` - 1, each due once in each of the epochs.
    """
    counts = Counter(delivered)
    due = {(epoch, sample) for epoch in range(epochs) for sample in range(samples)}
    return Accounting(
        samples=samples,
        epochs=epochs,
        missing=tuple(sorted(due - counts.keys())),
        repeated=tuple(sorted(pair for pair, times in counts.items() if times > 1)),
        unknown=tuple(sorted(counts.keys() - due)),
    )
