"""Messages between neighbours: JSON lines over a non-blocking socket, limited in length."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

from odb.errors import ODBError

LONGEST_LINE = 1 << 20
LONGEST_GREETING = 1 << 10
"""Of a caller that has not said who it is."""
LARGEST_BACKLOG = 4 << 20
"""Bytes kept for a neighbour that does not read; more is not kept for it."""

Message = dict[str, Any]


class WireError(ODBError):
    """What came over a connection is no message."""


class Line:
    """One end of a connection. Only the thread of the watch uses it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.longest = LONGEST_LINE
        """Bytes of the next line, at most."""
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def unsent(self) -> int:
        """Bytes that wait until the neighbour reads."""
        return len(self._unsent)

    def send(self, message: Message) -> None:
        """Send, or keep for `flush`. A connection that broke is found out by `receive`."""
        if len(self._unsent) < LARGEST_BACKLOG:
            self._unsent += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # broken: what the neighbour said last can still be read
            self._unsent.clear()

    def receive(self) -> tuple[list[Message], bool]:
        """The messages that have arrived, and whether the connection has ended.

        Raises WireError for anything that is no message.
        """
        ended = False
        try:
            while not ended and len(self._received) <= self.longest:
                data = self.socket.recv(1 << 16)
                ended = not data
                self._received += data
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        *lines, rest = self._received.split(b"\n")
        if len(lines[0] if lines else rest) > self.longest or len(rest) > LONGEST_LINE:
            raise WireError("a line is too long")
        self._received = bytearray(rest)
        return [_parse(line) for line in lines], ended

    def finish(self) -> None:
        """Say that nothing more will be sent."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.socket.close()


def _parse(line: bytes | bytearray) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError, OverflowError) as error:
        raise WireError(f"a line is no JSON: {line[:40]!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("t"), str):
        raise WireError(f"a line is no message: {line[:40]!r}")
    return message
