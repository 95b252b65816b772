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

    Raises, as the body ends: the first error of `work`. Nothing is called after that error.
    """

    def __init__(self, work: Callable[[T], object]) -> None:
        self._work = work
        self._items: queue.Queue[tuple[T] | None] = queue.Queue(2)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Behind[T]:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._thread is None:
            return
        self._items.put(None)
        if self._thread.ident is not None:  # an interrupt may have come before its start
            self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def put(self, item: T) -> None:
        """Give an item. Blocks if two items are waiting, so that memory stays bounded."""
        self._start()
        self._items.put((item,))

    def offer(self, item: T) -> bool:
        """Give an item unless another is waiting. Returns whether it was taken."""
        self._start()
        with contextlib.suppress(queue.Full):
            self._items.put_nowait((item,))
            return True
        return False

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fnaccel-behind", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            if self._error is None:
                try:
                    self._work(item[0])
                except BaseException as error:
                    self._error = error
