"""Windows: batches that make one update together, of one size or of a size that depends on the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeAlias

from fnaccel.data.batch import Batch, Window
from fnaccel.errors import ArgumentError

Size: TypeAlias = int | Callable[[int], int]
"""Batches in a window: a number, or a function of the step."""

_WHERE = "shard(loader, window=)"


def check(size: Size) -> None:
    """Raise ArgumentError unless it can be the size of a window."""
    if callable(size):
        at(size, 0)
    elif isinstance(size, bool) or not isinstance(size, int) or size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"window={size!r} batches make no update",
            where=_WHERE,
            fix="pass window=1 or more, a function of the step, or leave it out",
        )


def at(size: Size, step: int) -> int:
    """The size of the window of a step.

    Raises:
        ArgumentError: the function gives no number from 1 on.
    """
    if not callable(size):
        return size
    found = size(step)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"the function gives {found!r} for step {step}",
            where=_WHERE,
            fix="return a whole number from 1 on: window=lambda step: 1 if step < 1000 else 4",
        )
    return found


def grouped(batches: Iterator[Batch], size: Size, step: int) -> Iterator[Window]:
    """Batches in windows, the first for `step`. The last one may be smaller.

    Args:
        batches: may be read ahead by one.
        size: of the windows.
        step: of the first window.
    """
    while members := tuple(islice(batches, at(size, step))):
        yield Window(members)
        step += 1


def count(size: Size | None, batches: int, step: int) -> int:
    """How many windows that many batches make, the first for `step`."""
    if size is None:
        return batches
    if not callable(size):
        return -(-batches // size)
    first = step
    while batches > 0:
        batches -= at(size, step)
        step += 1
    return step - first
