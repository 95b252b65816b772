"""Ends the launcher's processes as Python does, except for objects from before the fork.

Tearing torch down object by object takes a third of a second in every rank, and C++ threads that
still run may abort it. The script's objects are closed here. The kernel frees everything else.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
from typing import NoReturn


def end(code: int) -> NoReturn:
    """End a process whose script has run: threads, exit handlers, the script's objects, open files.

    Args:
        code: the exit code.
    """
    try:
        # private, but multiprocessing calls it too at the end of a fork
        threading._shutdown()  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        atexit._run_exitfuncs()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        if threading.active_count() == 1:  # a daemon thread may still look names up in the script
            sys.modules["__main__"].__dict__.clear()
            gc.collect()
        for value in gc.get_objects():
            if issubclass(type(value), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
                with contextlib.suppress(OSError, ValueError):  # a closed file, a reader that is gone
                    value.flush()
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """End this process at once, after flushing its output.

    Args:
        code: the exit code.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)
