"""`SigintHeld`: Ctrl-C waits until a block that must not be cut in two is complete.

A second Ctrl-C goes through at once, so a block that never ends can be left.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports] - `signal.signal` takes 3 us a call, this 0.2
import threading
from collections.abc import Callable
from typing import Any

SIGINT = 2
_main = threading.main_thread().ident


class SigintHeld:
    """In the body a SIGINT waits. When the body ends, the previous handler gets it.

    To enter it a second time changes nothing, so that a caller may hold a SIGINT from one of two moments on.
    Does nothing outside of the main thread, which alone receives signals, or if SIGINT has no Python handler.

    Example:
        >>> with SigintHeld():
        ...     pass
    """

    __slots__ = ("_arrived", "_handler")

    def __init__(self) -> None:
        self._arrived = False
        self._handler: Callable[[int, Any], Any] | None = None

    def __enter__(self) -> None:
        if self._handler is None and threading.get_ident() == _main:
            handler: Any = _signal.getsignal(SIGINT)
            if callable(handler):
                self._handler = handler
                _signal.signal(SIGINT, self._hold)

    def _hold(self, number: int, frame: Any) -> None:
        if self._arrived and self._handler is not None:
            self._handler(number, frame)
        self._arrived = True

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            _signal.signal(SIGINT, self._handler)
            if self._arrived:
                _signal.raise_signal(SIGINT)
