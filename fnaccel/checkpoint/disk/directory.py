"""A checkpoint directory that is held open, so that all files read from it belong to one checkpoint.

A writer may give the directory another name and put a new checkpoint in its place. Files are therefore opened
below the open directory, and not by a path that may lead to the new checkpoint by then.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from fnaccel.checkpoint.disk import locking
from fnaccel.errors import CheckpointError

T = TypeVar("T")

_NUMBERS = Path("/proc/self/fd")  # on Linux: the open directories of this process, by number
_ATTEMPTS = 10


class Directory:
    """A directory that is open and locked. Made by `hold`.

    Attributes:
        path: its path when it was opened, for messages.
    """

    def __init__(self, path: Path, file: int | None) -> None:
        self.path = path
        self._file = file
        self._identity = _identity(path.stat() if file is None else os.fstat(file))

    def open(self, name: str, opener: Callable[[Path], T]) -> T:
        """Call `opener` with a path that leads to one file of this directory, and return its result.

        Args:
            name: the name of the file.
            opener: opens or reads the file.

        Raises:
            CheckpointError: the system has no path below an open directory, and the directory was replaced.
            OSError: from `opener`.
        """
        if self._file is not None and _NUMBERS.is_dir():
            return opener(_NUMBERS / str(self._file) / name)
        # No path leads below an open directory here. A directory that was replaced never gets its name
        # back, so if the name leads to it afterwards, then it did so before.
        result = opener(self.path / name)
        if self.is_replaced():
            raise CheckpointError(
                f"{self.path} was replaced while it was read",
                where=f"reading {self.path}",
                fix="read it again",
            )
        return result

    def read(self, name: str) -> bytes:
        """All bytes of one file.

        Raises:
            CheckpointError, OSError: see `open`.
        """
        return self.open(name, Path.read_bytes)

    def size_of(self, name: str) -> int | None:
        """The size of one file in bytes, or None if there is no such file.

        Raises:
            CheckpointError: see `open`.
        """
        return self.open(name, lambda path: path.stat().st_size if path.is_file() else None)

    def is_replaced(self) -> bool:
        """Whether the path leads to another directory by now, or nowhere."""
        try:
            return _identity(self.path.stat()) != self._identity
        except OSError:
            return True


@contextlib.contextmanager
def hold(path: Path) -> Generator[Directory]:
    """Open a checkpoint directory, and lock it so that no writer removes its files while the body runs.

    Raises:
        OSError: there is no such directory.
    """
    if sys.platform == "win32":
        yield Directory(path, None)
        return
    with locking.opened(path) as file:
        # Waits for a writer that is removing the directory. Then its files are gone: the caller begins again.
        locking.lock(file, shared=True)
        yield Directory(path, file)


def attempts() -> Iterator[bool]:
    """Attempts to read a checkpoint that is being replaced, with pauses. Yields True for the last attempt."""
    for number in range(_ATTEMPTS):
        if number:
            time.sleep(0.005 * number)
        yield number == _ATTEMPTS - 1


def attempt(path: Path, stack: ExitStack, read: Callable[[Directory], T], *, last: bool) -> T | None:
    """Hold a checkpoint directory until `stack` closes, and read it.

    Args:
        path: the checkpoint.
        stack: holds the directory, also after an error.
        read: reads from the directory. It never returns None.
        last: whether this is the last attempt, so that any error is raised.

    Returns:
        The result of `read`, or None if the directory was replaced, so that the caller has to begin again.

    Raises:
        CheckpointError: `read` failed, and the directory was not replaced.
    """
    try:
        directory = stack.enter_context(hold(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        if not last:
            return None
        raise CheckpointError(
            f"there is no directory {path}",
            where=f"reading {path}",
            fix="give the directory that fa.save was given, on a disk that every rank can read",
        ) from error
    try:
        return read(directory)
    except (CheckpointError, OSError):
        if last or not directory.is_replaced():
            raise
        return None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
