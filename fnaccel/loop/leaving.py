"""How a loop over `fa.scan(save=...)` is left: by `break`, `return` or `close`, or by an exception.

Python does not say how to an iterator that is dropped. The instruction at which the frame of the loop stands
does: `break` and `return` drop the iterator of their loop with one of their own.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_LOOP_ENDS = ("POP_TOP", "POP_ITER", "FOR_ITER", "END_FOR")
"""The instructions that drop an iterator whose loop ends: https://docs.python.org/3/library/dis.html."""


class LeftLoops(Iterator[T]):
    """A generator that says how loops over it are left. It may be taken up again.

    Args:
        steps: the generator.
        leave: called with True if a loop is left on purpose, and with False if the generator is dropped.
    """

    def __init__(self, steps: Generator[T], leave: Callable[[bool], None]) -> None:
        self.steps = steps
        self.leave = leave

    def __iter__(self) -> Iterator[T]:
        return _Loop(self)

    def __next__(self) -> T:
        return next(self.steps)

    def close(self) -> None:
        """End the generator, on purpose unless an exception is being handled."""
        self.leave(sys.exc_info()[0] is None)
        self.steps.close()

    def __del__(self) -> None:
        self.leave(False)


class _Loop(Iterator[T]):
    """The iterator of one loop. A variable may hold `LeftLoops`, and only the loop holds this."""

    def __init__(self, loops: LeftLoops[T]) -> None:
        self._loops = loops

    def __next__(self) -> T:
        return next(self._loops.steps)

    def close(self) -> None:
        """As `LeftLoops.close`: `iter` of a generator is the generator too."""
        self._loops.close()

    def __del__(self) -> None:
        if loop_ends(inspect.currentframe()):
            self._loops.leave(True)


def loop_ends(dropped: FrameType | None) -> bool:
    """Whether an iterator is dropped where its loop is left by `break` or `return`, or has run to its end.

    Generators in between, such as a progress bar, are closed in turn: the frame of the loop is behind them.

    Args:
        dropped: the frame of the iterator's `__del__`.
    """
    frame = None if dropped is None else dropped.f_back
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR and _at(frame) == "YIELD_VALUE":
        frame = frame.f_back
    return frame is not None and _at(frame) in _LOOP_ENDS


def _at(frame: Any) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]
