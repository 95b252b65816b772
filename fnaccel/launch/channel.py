"""`Channel`: the connection between a launcher and its coordinator process."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from typing import Any


class Channel:
    """One end of the connection between a launcher and its coordinator: dicts, as lines of JSON.

    Attributes:
        closed: whether the other end is gone.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._line = b""
        self.closed = False

    def fileno(self) -> int:
        """The descriptor, for `select`."""
        return self._end.fileno()

    def send(self, **message: Any) -> None:
        """Send a message, if the other end is still there."""
        with contextlib.suppress(OSError):
            self._end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None) -> list[dict[str, Any]]:
        """The messages that have come, after waiting for one at most `timeout` seconds (None: for ever)."""
        if self.closed or not select.select([self._end], [], [], timeout)[0]:
            return []
        try:
            data = self._end.recv(65_536)
        except OSError:
            data = b""
        self.closed = not data
        *lines, self._line = (self._line + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self._end.close()
