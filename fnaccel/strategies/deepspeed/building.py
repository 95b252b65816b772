"""The first build of an extension of DeepSpeed: one line before it, and no wait for a killed build.

torch marks a build by an empty file `lock` without a process id, and waits for it without end. So a build of
ours holds an `flock` beside the folder of the extension. The kernel releases it when its process ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from fnaccel import _torch

_logger = logging.getLogger("fnaccel")
STALE = 900
"""Seconds. The longest build takes a few minutes."""
_DURATIONS = {"deepspeed_shm_comm": "about 100 s"}


def guard(builder: Any) -> None:
    """Let a class `OpBuilder` of DeepSpeed build inside of `building`. Once for each class."""
    original = builder.jit_load
    if hasattr(original, "guarded"):
        return

    @functools.wraps(original)
    def jit_load(self: Any, verbose: bool = True) -> Any:
        with building(self.name):
            return original(self, verbose)

    vars(jit_load)["guarded"] = True
    builder.jit_load = jit_load


@contextlib.contextmanager
def building(name: str) -> Generator[None]:
    """Hold the right to build an extension while the body builds or loads it.

    A lock of torch that a killed build of ours left is removed. A lock of another program that is older than
    `STALE` is named in a warning and stays.

    Args:
        name: of the extension, such as `deepspeed_shm_comm`.
    """
    folder = Path(_torch.extension_directory(name))
    with _flock(folder.with_name(f".{name}.fnaccel.lock")) as mark:
        lock, library = folder / "lock", folder / f"{name}.so"
        if lock.exists() and mark is not None and os.fstat(mark).st_size > 0:
            lock.unlink(missing_ok=True)
        foreign = _check_foreign(lock)
        if not library.exists() and not foreign:
            duration = _DURATIONS.get(name, "some minutes")
            _logger.warning("compiling %s, once, %s: %s", name.removeprefix("deepspeed_"), duration, folder)
        # without the mark, a lock belongs to a program that does not take the flock
        _set_mark(mark, "" if foreign else "building")
        yield
        _set_mark(mark, "")


def _check_foreign(lock: Path) -> bool:
    """Whether another program builds, or seems to. Name a lock that is old."""
    try:
        age = time.time() - lock.stat().st_mtime
    except OSError:
        return False
    if age > STALE:
        _logger.warning(
            "%s is older than %d minutes: if no build is running, remove it. DeepSpeed waits for it "
            "without end",
            lock,
            STALE // 60,
        )
    return True


@contextlib.contextmanager
def _flock(path: Path) -> Generator[int | None]:
    """Open a file and hold its lock. Waits for another process that holds it. None if no file can be made."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:  # a folder that was filled before, and can only be read
        yield None
        return
    try:
        if sys.platform != "win32":
            import fcntl  # noqa: PLC0415 - absent on Windows

            fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _set_mark(file: int | None, text: str) -> None:
    if file is not None:
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(), 0)
