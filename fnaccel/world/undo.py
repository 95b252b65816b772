"""What is put back: swapped values, random streams, torch's settings. A Ctrl-C waits for its end."""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports] - `signal.signal` takes 3 us a call, this 0.2
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import methodcaller
from types import FrameType
from typing import Any

import torch

from fnaccel.world.random_streams import generators_of

SIGINT = 2
_main = threading.main_thread().ident


class SigintHeld:
    """In the body a SIGINT waits. When the body ends, the previous handler gets it.

    A second SIGINT goes through at once, so that a body that never ends can be left. To enter it a second
    time changes nothing, so that a caller may hold a SIGINT from one of two moments on. Does nothing outside
    of the main thread, which alone receives signals, or if SIGINT has no Python handler.

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
            _signal.signal(SIGINT, self._handler)  # it may raise before the body began, or in `__exit__`
            self._handler(number, frame)
        self._arrived = True

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            _signal.signal(SIGINT, self._handler)
            if self._arrived:
                _signal.raise_signal(SIGINT)


class Swapped(ABC):
    """In the body something has other values. A SIGINT cuts neither the change nor its undoing in two.

    The body itself can be interrupted. A SIGINT at the first instruction of `__exit__` would leave the other
    values for good, so a handler of its own looks where the SIGINT arrived.
    """

    _previous: Callable[[int, FrameType | None], Any] | None = None
    _arrived = False
    _ended = False

    @abstractmethod
    def change(self) -> None:
        """Put the other values in place."""

    @abstractmethod
    def undo(self) -> None:
        """Put back as much as `change` has changed. Called again if an error has ended it."""

    def __enter__(self) -> None:
        handler: Any = _signal.getsignal(SIGINT) if threading.get_ident() == _main else None
        if callable(handler):
            self._previous = handler
            _signal.signal(SIGINT, self._hold)
        try:
            self.change()
            if self._arrived and self._previous is not None:
                self._arrived = False
                self._previous(SIGINT, None)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._undo()
        finally:
            if self._previous is not None and _signal.getsignal(SIGINT) == self._hold:
                _signal.signal(SIGINT, self._previous)  # not if the body has left another there
            self._ended = True  # not before: until here a SIGINT would end this method
            if self._previous is not None and self._arrived:
                _signal.raise_signal(SIGINT)

    def _undo(self) -> None:
        try:
            self.undo()
        except BaseException:  # of another signal's handler, or memory: it goes on from there
            try:
                self.undo()
            except BaseException:
                self.lose()
                raise
            raise

    def lose(self) -> None:  # noqa: B027 - most have nothing to lose
        """Make what has other values unusable: they can't be put back."""

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if not self._ended and self._is_at_an_end(frame):
            self._arrived = True
        elif self._previous is not None:
            self._previous(number, frame)

    def _is_at_an_end(self, frame: FrameType | None) -> bool:
        """Whether a frame is one of `__enter__` or `__exit__` of this object, or is called by one."""
        ends = (Swapped.__enter__.__code__, Swapped.__exit__.__code__)
        while frame is not None:
            if frame.f_code in ends and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False


class StreamStates:
    """The states of random streams at this moment, to go back to. Or other states, to go to.

    Attributes:
        states: one of each stream.
    """

    __slots__ = ("_streams", "states")

    def __init__(self, streams: Sequence[Any], states: Sequence[torch.Tensor] | None = None) -> None:
        self._streams = streams
        self.states = list(map(methodcaller("get_state"), streams)) if states is None else states

    @classmethod
    def of(cls, device: torch.device) -> StreamStates:
        """Those of the streams that a forward on `device` may draw from."""
        return cls(generators_of(device))

    def reseed(self, seed: int) -> None:
        """Let all streams begin anew."""
        for stream in self._streams:
            stream.manual_seed(seed)

    def moved(self) -> bool:
        """Whether numbers were drawn since then."""
        pairs = zip(self._streams, self.states, strict=True)
        return any(not torch.equal(stream.get_state(), state) for stream, state in pairs)

    def put_back(self) -> None:
        """Let the streams go on from there."""
        for stream, state in zip(self._streams, self.states, strict=True):
            stream.set_state(state)


class TorchSettings:
    """torch's settings as this is made (and not entered): grad mode, and autocast on a `kind` of device.

    A body that raises puts them back. An interrupt may cut off the end of a context that switched one.
    """

    __slots__ = ("autocast", "grad", "kind")

    def __init__(self, kind: str = "") -> None:
        self.kind = kind
        self.grad = torch.is_grad_enabled()
        if kind:
            torch.autocast_increment_nesting()
            depth = torch.autocast_decrement_nesting()
            cached = torch.is_autocast_cache_enabled()
            self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached, depth

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.put_back()

    def put_back(self) -> None:
        """Make them as they were. (2.9 to 2.13)"""
        torch.set_grad_enabled(self.grad)
        if not self.kind:
            return
        enabled, dtype, cached, depth = self.autocast
        torch.clear_autocast_cache()
        now = torch.autocast_increment_nesting()
        while now > depth:
            now = torch.autocast_decrement_nesting()
        while now < depth:
            now = torch.autocast_increment_nesting()
        torch.set_autocast_enabled(self.kind, enabled)
        torch.set_autocast_dtype(self.kind, dtype)
        torch.set_autocast_cache_enabled(cached)
