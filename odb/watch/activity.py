"""Where a rank's driver leaves a note of what it is doing, for the watch to read."""

from __future__ import annotations

import time

from odb.watch.status import AT_REST, Doing, Seen, Status, status_of
from spec.messages import Command
from spec.rank import RankState


class Activity:
    """Written by the driver's thread, read by the watch's: one assignment, no lock."""

    def __init__(self) -> None:
        self.seen = Seen(Status(Doing.STARTING), time.monotonic())

    def begin(self, command: Command, state: RankState) -> None:
        """The driver is about to perform a command."""
        status = status_of(command, state)
        if status is None:
            return
        before = self.seen.status
        begins = before.doing in AT_REST and status.doing not in AT_REST
        run = before.run + 1 if begins else before.run
        self.seen = Seen(status._replace(run=run), time.monotonic())

    def hand_over(self) -> None:
        """The batch at hand is made and goes to the trainer."""
        status = self.seen.status._replace(doing=Doing.HANDING_OVER)
        self.seen = Seen(status, time.monotonic())
