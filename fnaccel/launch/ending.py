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
import signal
import sys
import threading
import weakref
from typing import Any, NoReturn


def end(code: int) -> NoReturn:
    """End a process whose script has run: threads, exit handlers, the script's objects, open files.

    Args:
        code: the exit code.
    """
    try:
        _finish_threads_and_handlers()
        if threading.active_count() == 1:  # a daemon thread may still look names up in the script
            sys.modules["__main__"].__dict__.clear()
            gc.collect()
        for value in gc.get_objects():
            if issubclass(type(value), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
                with contextlib.suppress(OSError, ValueError):  # a closed file, a reader that is gone
                    value.flush()
    finally:
        leave(code)


def forget_handlers() -> None:
    """In a fork: drop the caller's reactions to signals, and to its exit (removing its temporary folders).

    The event loop of a notebook reads signals from a socket that a fork shares.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    finalizers: Any = weakref.finalize
    for finalizer in list(finalizers._registry):  # noqa: SLF001
        finalizer.atexit = False
    atexit.register(finalizers._exitfunc)  # noqa: SLF001


def end_function(code: int) -> NoReturn:
    """End a process whose function has returned. Open files of the caller stay its own.

    Args:
        code: the exit code.
    """
    try:
        _finish_threads_and_handlers()
    finally:
        leave(code)


def _finish_threads_and_handlers() -> None:
    # private, but multiprocessing calls it too at the end of a fork
    threading._shutdown()  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    atexit._run_exitfuncs()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def leave(code: int) -> NoReturn:
    """End this process at once, after flushing its output.

    Args:
        code: the exit code.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # None if it was closed
                stream.flush()
    finally:
        os._exit(code)
