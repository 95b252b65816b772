"""`CallLog`: which calls of this rank need all ranks of the world, in the order in which it made them.

Ranks compare their logs if a call waits for too long or fails: see `watcher.py`. A log costs one counter and
one name a call. Nothing is sent here.
"""

from __future__ import annotations

import functools
import inspect
import sysconfig
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import ParamSpec, TypeVar

from fnaccel.world import progress_marks

P = ParamSpec("P")
R = TypeVar("R")

NAMES = 64
"""How many of the newest calls a log remembers by name."""

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))

LISTENERS: list[Callable[[int, str, bool], None]] = []
"""Called with a call's number, its name and True when it begins, and with False when it ends."""

Explain = Callable[[str, RuntimeError], Exception | None]
"""`explain(name, error)` returns the error to raise in place of a collective's error, or None."""


class CallLog:
    """The calls of one rank that need all ranks.

    Attributes:
        count: how many calls were begun.
        newest: (number, name) of the newest of them. Pairs, so that another thread never sees a name without
            its number.
        thread: the thread that is inside a call, or None between calls.
        failed: the number of the newest call that raised, or 0.
        failed_at: the line of the script that made that call.
        abandoned: the number of the newest call that raised in its middle on this rank alone, as far as it
            knows, or 0. A rank that waits in it waits for nothing.
        why: the reason, as a relative clause about the rank.
        explain: says which error to raise if a collective fails.
    """

    __slots__ = ("_frame", "abandoned", "count", "explain", "failed", "failed_at", "newest", "thread", "why")

    def __init__(self) -> None:
        self.count = 0
        self.newest: deque[tuple[int, str]] = deque(maxlen=NAMES)
        self.thread: int | None = None
        self._frame: FrameType | None = None  # whose callers wait: another thread can't read frames that run
        self.failed = 0
        self.failed_at = ""
        self.abandoned = 0
        self.why = ""
        self.explain: Explain | None = None

    def run(self, name: str, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `fn(*args, **kwargs)` and note it as one call of all ranks, unless it is part of another one.

        Raises:
            PeerLostError: a collective in it failed because another rank left or made another call.
        """
        thread = threading.get_ident()
        if self.thread == thread:  # the outer call names this one, and explains its errors
            progress_marks.note(f"calls {name}")
            return fn(*args, **kwargs)
        if self.thread is not None:  # a save in the background, which has a process group of its own
            return self.explained(name, fn, *args, **kwargs)
        self.count += 1
        self.newest.append((self.count, name))
        self.thread = thread
        self._frame = inspect.currentframe()
        for listener in LISTENERS:
            listener(self.count, name, True)
        try:
            return self.explained(name, fn, *args, **kwargs)
        except BaseException:
            self.failed, self.failed_at = self.count, self.place()
            raise
        finally:
            self.thread = self._frame = None
            for listener in LISTENERS:
                listener(self.count, name, False)

    def explained(self, name: str, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `fn(*args, **kwargs)`, and raise a better error if a collective in it fails.

        Raises:
            PeerLostError: a collective in it failed because another rank left or made another call.
        """
        try:
            return fn(*args, **kwargs)
        except RuntimeError as error:
            better = None if self.explain is None else self.explain(name, error)
            if better is None:
                raise
            raise better from error

    def wrap(self, name: str, fn: Callable[P, R]) -> Callable[P, R]:
        """`fn` as a function whose every call is noted under `name`."""
        return functools.partial(self.run, name, fn)

    def outer(self) -> str:
        """The name of the call that this thread is inside of, or `""`."""
        return self.newest[-1][1] if self.thread == threading.get_ident() else ""

    def place(self) -> str:
        """The line of the script that made the current call, such as `"train.py:12"`, or `""` if unknown."""
        if self.thread is None:
            return self.failed_at if self.failed == self.count else ""
        return place_of(self._frame)


def place_of(frame: FrameType | None) -> str:
    """The innermost line on the stack that belongs to neither fnaccel nor an installed library."""
    while frame is not None:
        path = frame.f_code.co_filename
        if is_of_script(path):
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_of_script(path: str) -> bool:
    """Whether a file of code belongs to neither fnaccel nor an installed library."""
    return not path.startswith((_PACKAGE, *_LIBRARIES, "<"))
