"""What checking traces finds: verdicts, the first divergence, and every promise."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Verdict(Enum):
    """Whether a run obeys the spec. INCOMPLETE: what is there does, and something is missing."""

    CONFORMS = "conforms"
    INCOMPLETE = "incomplete"
    DIVERGES = "diverges"


class Judged(Enum):
    """What became of a promise."""

    HOLDS = "holds"
    NOT_ASKED = "does not apply"
    UNKNOWN = "cannot be checked"
    BROKEN = "broken"


class Kind(Enum):
    """What a divergence is about."""

    EVENT = "an event that the spec does not accept"
    COMMAND = "commands that are not the spec's"
    PERFORMED = "commands that were not carried out as given"
    STATE = "a state that is not the spec's"
    END = "an end that is not the spec's"
    EXCHANGE = "an exchange with another result than its posts have"
    CRASH = "a defect of odb"


@dataclass(frozen=True)
class Divergence:
    """The first place at which a run and the spec part. round, step: where the rank is by then."""

    kind: Kind
    path: Path
    line: int
    rank: int
    round: int
    step: int
    spec: str
    trace: str

    def __str__(self) -> str:
        where = f"{self.path}, line {self.line}: rank {self.rank}, round {self.round}, "
        return f"{where}step {self.step}: the spec {self.spec}; the trace says: {self.trace}"


@dataclass(frozen=True)
class PromiseResult:
    """A promise over the merged run. text: how it broke, or why it cannot be checked."""

    name: str
    judged: Judged
    text: str = ""


@dataclass(frozen=True)
class EpochReport:
    """One epoch. rounds, steps, samples: of all ranks together, as recorded (steps of the rank with
    most). outcome: in words. missing: what could not be looked at."""

    folder: Path
    epoch: int
    world_size: int
    rounds: int
    steps: int
    samples: int
    outcome: str
    transitions: int
    divergences: tuple[Divergence, ...]
    promises: tuple[PromiseResult, ...]
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def broken(self) -> tuple[PromiseResult, ...]:
        """The promises that fell."""
        return tuple(row for row in self.promises if row.judged is Judged.BROKEN)

    @property
    def verdict(self) -> Verdict:
        """CONFORMS only if everything was there, was replayed and held."""
        if self.divergences or self.broken:
            return Verdict.DIVERGES
        return Verdict.INCOMPLETE if self.missing else Verdict.CONFORMS

    def problems(self) -> tuple[str, ...]:
        """All that is wrong, the first cause first, a line each."""
        found = [str(self.divergences[0])] if self.divergences else []
        found += [f"promise {row.name} is broken: {row.text}" for row in self.broken]
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            **asdict(self),
            "folder": str(self.folder),
            "verdict": self.verdict.value,
            "divergences": [
                {**asdict(d), "kind": d.kind.name, "path": str(d.path)} for d in self.divergences
            ],
            "promises": [
                {"name": row.name, "judged": row.judged.value, "text": row.text}
                for row in self.promises
            ],
        }


@dataclass(frozen=True)
class Report:
    """All epochs of a folder."""

    folder: Path
    epochs: tuple[EpochReport, ...] = field(default_factory=tuple)

    @property
    def verdict(self) -> Verdict:
        """The worst of any epoch."""
        verdicts = {epoch.verdict for epoch in self.epochs}
        for worst in (Verdict.DIVERGES, Verdict.INCOMPLETE):
            if worst in verdicts:
                return worst
        return Verdict.CONFORMS

    @property
    def conforms(self) -> bool:
        """Whether every epoch does, completely."""
        return self.verdict is Verdict.CONFORMS

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        epochs = [epoch.as_json() for epoch in self.epochs]
        return {"folder": str(self.folder), "verdict": self.verdict.value, "epochs": epochs}

    def __str__(self) -> str:
        lines = [f"{self.folder}: {self.verdict.value}"]
        for epoch in self.epochs:
            lines.append(f"epoch {epoch.epoch}: {epoch.verdict.value}")
            lines += (f"  {text}" for text in (*epoch.problems(), *epoch.missing))
        return "\n".join(lines)
