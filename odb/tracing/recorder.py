"""Writes what a rank's interpreter does to a file, one line of JSON for each transition.

A line is one `write` to the operating system, without a buffer, so that a process that is killed
loses at most the line that it was writing. Trouble with the disk ends the recording, not the
training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from odb.errors import ConfigError
from odb.tracing.encoding import (
    Names,
    command_to_json,
    config_to_json,
    event_to_json,
    outcome_to_json,
    rules_to_json,
    state_to_json,
)
from spec.config import PROTOCOL_VERSION
from spec.messages import Command, End, Event, Tallied, Totalled
from spec.rank import RankState, Setup

logger = logging.getLogger("odb")

FORMAT = 2
"""The version of the format, in the first line of every trace."""

_to_text = json.JSONEncoder(separators=(",", ":")).encode


def epoch_folder(epoch: int, again: int = 0) -> str:
    """The folder of an epoch within that of the traces; `again`: how often the same loader had run
    this epoch before."""
    return f"epoch-{epoch:05}" + (f"-again-{again}" if again else "")


def rank_file(rank: int) -> str:
    """The file of a rank within the folder of an epoch."""
    return f"rank-{rank:05}.jsonl"


class TraceFolder:
    """Where a loader records its epochs: one folder for each, in it one file for each rank."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Raises ConfigError if the folder cannot be made, or holds traces already."""
        self.path = Path(folder)
        self._passes: Counter[int] = Counter()
        self._stopped = False
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            found = sorted(entry.name for entry in self.path.glob("epoch-*"))
        except OSError as error:
            raise ConfigError(
                f"trace_dir: the folder {self.path} cannot be used: {error}"
            ) from None
        if found:
            raise self._not_empty(found[0])

    def _not_empty(self, name: str) -> ConfigError:
        return ConfigError(
            f"trace_dir: {self.path} holds {name} already, and traces of two runs or two loaders "
            "must not be mixed: pass an empty folder"
        )

    def open(self, setup: Setup, epoch: int, divided: bool) -> TraceFile:
        """Start the file of an epoch. `divided`: odb divides the dataset among the ranks, so that
        no name of a sample occurs twice. Raises ConfigError if there is such a file already."""
        name = f"{epoch_folder(epoch, self._passes[epoch])}/{rank_file(setup.rank)}"
        self._passes[epoch] += 1
        file = TraceFile(self, self.path / name)
        if not self._stopped:
            try:
                file.create()
            except FileExistsError:
                raise self._not_empty(name) from None
            except OSError as error:
                self.stop(error)
        file.write(header(setup, epoch, divided))
        return file

    def stop(self, error: OSError) -> None:
        """Record no more, and say so once."""
        if not self._stopped:
            self._stopped = True
            logger.warning("odb: recording traces in %s has stopped: %s", self.path, error)


def header(setup: Setup, epoch: int, divided: bool) -> dict[str, Any]:
    """The first line of a trace: all that replaying needs to know."""
    import odb

    first: dict[str, Any] = {
        "odb_trace": FORMAT,
        "protocol": PROTOCOL_VERSION,
        "odb": odb.__version__,
        "rank": setup.rank,
        "world_size": setup.world_size,
        "epoch": epoch,
        "divided": divided,
        "config": config_to_json(setup.config),
    }
    changed = rules_to_json(setup.rules)
    return {**first, "rules": changed} if changed else first


class TraceFile:
    """A file to which lines are written until that fails."""

    def __init__(self, folder: TraceFolder, path: Path) -> None:
        self._folder = folder
        self._path = path
        self._descriptor: int | None = None

    def create(self) -> None:
        """Make the file; raises OSError."""
        self._path.parent.mkdir(exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._descriptor = os.open(self._path, flags, 0o644)

    def write(self, line: dict[str, Any]) -> None:
        """Write a line."""
        if self._descriptor is None:
            return
        data = _to_text(line).encode() + b"\n"
        try:
            if os.write(self._descriptor, data) != len(data):
                raise OSError("the disk is full")
        except OSError as error:
            self.close()
            self._folder.stop(error)

    def close(self) -> None:
        """Write no more."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class Recorder:
    """The observer of one rank's epoch (see `odb.observer.Observer`)."""

    def __init__(self, file: TraceFile, names: Names) -> None:
        self._file = file
        self._names = names
        self._began = time.monotonic()
        self._given: Sequence[Command] = ()
        self._begun: list[Command] = []
        self._why: str | None = None
        self._state: RankState | None = None

    def began(self, state: RankState, commands: Sequence[Command]) -> None:
        self._began = time.monotonic()
        self._write({"do": list(map(command_to_json, commands))})
        self._given, self._state = commands, state

    def performs(self, command: Command) -> None:
        self._begun.append(command)
        if isinstance(command, End):
            # Before it is performed: the process may end as soon as its trainer knows.
            assert self._state is not None
            outcome, state = outcome_to_json(command.outcome), state_to_json(self._state)
            self._write({"end": outcome, "state": state})
            self._given = ()

    def failed(self, error: BaseException) -> None:
        self._why = f"{type(error).__name__}: {error}".partition("\n")[0]

    def fed(self, event: Event, state: RankState, commands: Sequence[Command]) -> None:
        line: dict[str, Any] = {
            "event": event_to_json(event, self._names),
            "do": [command_to_json(command) for command in commands],
        }
        if isinstance(event, Tallied | Totalled):
            line["state"] = state_to_json(state)
        if self._why is not None:
            line["why"], self._why = self._why, None
        self._write(line)
        self._given, self._state = commands, state

    def ended(self) -> None:
        self._file.close()

    def crashed(self, error: BaseException) -> None:
        self._given, self._begun = (), []
        self._write({"crash": f"{type(error).__name__}: {error}"})
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        timed: dict[str, Any] = {"t": round(time.monotonic() - self._began, 6), **line}
        begun = self._begun
        if len(begun) != len(self._given) or any(
            a is not b for a, b in zip(begun, self._given, strict=True)
        ):
            timed["begun"] = list(map(command_to_json, begun))
        self._begun = []
        self._file.write(timed)
