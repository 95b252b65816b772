"""Work that a second thread does in order while the first goes on.

No executor of the standard library: those take no work once the interpreter begins to end, and a save
in the background may still be under way then.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Behind(Generic[T]):
    """Calls `work(item)` for each item, in a thread of its own, which ends with the body of `with`.

    If no thread can be started, the calls are made where items are given.

    Raises, as the body ends: the first error of `work`. Nothing is called after that error.
    """

    def __init__(self, work: Callable[[T], object]) -> None:
        self._work = work
        self._items: queue.Queue[tuple[T] | None] = queue.Queue(2)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._alone = False

    def __enter__(self) -> Behind[T]:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._thread is not None:
            self._items.put(None)
            if self._thread.ident is not None:  # an interrupt may have come before its start
                self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def put(self, item: T) -> None:
        """Give an item. Blocks if two items are waiting, so that memory stays bounded."""
        if self._started():
            self._items.put((item,))
        else:
            self._do(item)

    def offer(self, item: T) -> bool:
        """Give an item unless another is waiting. Returns whether it was taken."""
        if not self._started():
            self._do(item)
            return True
        with contextlib.suppress(queue.Full):
            self._items.put_nowait((item,))
            return True
        return False

    def _started(self) -> bool:
        """Start the thread, unless the interpreter begins to end: Python 3.12 starts none then."""
        if self._thread is None and not self._alone:
            self._thread = threading.Thread(target=self._run, name="fnaccel-behind", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._thread, self._alone = None, True
        return not self._alone

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            self._do(item[0])

    def _do(self, item: T) -> None:
        if self._error is None:
            try:
                self._work(item)
            except BaseException as error:
                self._error = error
