"""Locks on directories, which the system drops when the process ends.

A reader or a writer of a directory holds a shared lock. A process that removes the directory holds an
exclusive lock while it does so. Checkpoints are not known here.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, *, shared: bool) -> Generator[bool | None]:
    """Lock a directory for as long as the body runs.

    Args:
        path: the directory.
        shared: wait for a lock that other processes may share. If False, try to get an exclusive lock.

    Yields:
        Whether the lock was given, or None if the file system has no locks.

    Raises:
        OSError: the directory can't be opened.
    """
    if sys.platform == "win32":
        yield None
        return
    with opened(path) as file:
        yield lock(file, shared=shared)


@contextlib.contextmanager
def opened(path: Path) -> Generator[int]:
    """The number of an open directory. Not for Windows, which can't open directories.

    Raises:
        OSError: the directory can't be opened.
    """
    file = os.open(path, os.O_RDONLY)
    _open.add(file)
    try:
        yield file
    finally:
        if file in _open:  # or else this is a child that was forked in the body
            _open.discard(file)
            os.close(file)


def lock(file: int, *, shared: bool) -> bool | None:
    """Lock an open directory. Returns whether the lock was given, or None if the file system has no locks."""
    if sys.platform == "win32":
        return None
    import fcntl  # noqa: PLC0415 - not on every system

    try:
        # shared for readers and writers: network file systems give no more to a file that is open for reading
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


_open: set[int] = set()


def _forget() -> None:
    """Close a forked child's copies, which would hold the locks for as long as the child lives."""
    while _open:
        os.close(_open.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
