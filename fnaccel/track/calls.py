"""The calls of one tracker: errors are counted, and a tracker that blocks does not stop training.

`LoopCalls` calls a tracker in the loop. `ThreadCalls` calls it in a thread of its own behind a queue.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from fnaccel.track.tracker import Tracker

_logger = logging.getLogger("fnaccel")

ROWS = 1_000
"""Calls that wait in the queue of one tracker."""
PATIENCE = 10.0
"""Seconds that the loop waits for a full queue, in all for each tracker."""
LIMIT = 60.0
"""Seconds that the loop waits for an image or a file, each time, and for the end of all trackers."""

_NONE: Mapping[str, Any] = {}


def calls_of(tracker: Tracker) -> LoopCalls:
    """Choose how a tracker is called: in the loop if it has `in_loop = True`, or else in its own thread."""
    return LoopCalls(tracker) if getattr(tracker, "in_loop", False) else ThreadCalls(tracker)


class LoopCalls:
    """Calls a tracker in the loop.

    Attributes:
        tracker: the tracker.
        name: the name of its class.
        errors: the number of its calls that raised.
        lost: the number of its calls that were not made, because it blocked.
    """

    _caught: ClassVar[tuple[type[BaseException], ...]] = (Exception, SystemExit)

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.name = type(tracker).__name__
        self.errors = 0
        self.lost = 0
        self._finished = False

    def log(self, step: int, values: dict[str, Any], options: Mapping[str, Any]) -> None:
        """Write one step's metrics."""
        self._call("log", (step, values), options)

    def show(self, method: str, *args: Any) -> None:
        """Call a method of an ability."""
        self._call(method, args)

    def end(self) -> None:
        """Begin to end the tracker."""
        self._finished = self._call("finish")

    def join(self, deadline: float) -> None:
        """Wait until the tracker has ended, or until a time of `time.monotonic`."""
        del deadline
        if self._finished and hasattr(self.tracker, "release"):
            self._call("release")

    def _call(self, method: str, args: tuple[Any, ...] = (), options: Mapping[str, Any] = _NONE) -> bool:
        """Call a method of the tracker. Returns whether it worked.

        An error is counted, and the first one is logged. `sys.exit` in a tracker is such an error.
        """
        try:
            getattr(self.tracker, method)(*args, **options)
        except self._caught:
            self.errors += 1
            if self.errors == 1:
                _logger.exception("%s.%s() raised; training goes on", self.name, method)
            return False
        return True


@attrs.frozen
class _Call:
    """A call in the queue of a thread. `done` is set after it, if the loop waits for it."""

    method: str
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = _NONE
    done: threading.Event | None = None


class ThreadCalls(LoopCalls):
    """Calls a tracker in order in a thread of its own, which starts at the first call.

    If the tracker blocks, its queue becomes full. The loop waits for it up to `PATIENCE` seconds in all.
    After that, rows that find the queue full are dropped and counted.
    """

    _caught = (BaseException,)  # an error that ended the thread would look like a tracker that blocks

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(tracker)
        self._queue: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._started = False
        self._over = threading.Event()  # a `join` of the thread that Ctrl-C interrupts would count as its end
        self._patience = PATIENCE
        self._late: tuple[str, threading.Event] | None = None

    def log(self, step: int, values: dict[str, Any], options: Mapping[str, Any]) -> None:
        """Queue one step's metrics. They are dropped if the tracker blocks for too long."""
        row = _Call("log", (step, values), options)
        if self._put(row, 0.0):
            return
        began = time.monotonic()
        if not self._put(row, self._patience):
            self._lose(f"in log(), and training waited {PATIENCE:g} s for it")
        self._patience = max(0.0, self._patience - (time.monotonic() - began))

    def show(self, method: str, *args: Any) -> None:
        """Queue a call of an ability, and wait until it is done, up to `LIMIT` seconds.

        The loop waits because it may change the image or the file afterwards. While one such call is late,
        further ones are dropped.
        """
        if self._late is not None and not self._late[1].is_set():
            self._lose(f"in {self._late[0]}()")
            return
        done, deadline = threading.Event(), time.monotonic() + LIMIT
        if not self._put(_Call(method, args, done=done), LIMIT):
            self._lose(f"in log(), and training waited {LIMIT:g} s before {method}()")
        elif not done.wait(max(0.0, deadline - time.monotonic())):
            self._late = (method, done)
            _logger.warning("%s blocks in %s(): training waited %g s for it", self.name, method, LIMIT)

    def end(self) -> None:
        """Queue the end of the tracker, even if the queue is full."""
        self._put(_Call("finish"), 0.0, places=1)

    def join(self, deadline: float) -> None:
        """Wait until the queue is written and the tracker has ended, or until a time of `time.monotonic`."""
        if self._over.wait(max(0.0, deadline - time.monotonic())):
            return super().join(deadline)
        with self._changed:
            rows = sum(call.method != "finish" for call in self._queue)
            self._queue.clear()
            self._queue.append(_Call(""))  # if the call that blocks returns, the thread ends without `finish`
        self.lost += rows
        _logger.warning(
            "%s did not end within %g s: training goes on without it, and %d rows of its queue are lost",
            self.name, LIMIT, rows,
        )  # fmt: skip
        return None

    def _put(self, call: _Call, seconds: float, places: int = 0) -> bool:
        """Queue a call if there is a place within so many seconds, or in so many places more."""
        with self._changed:
            if not self._started:
                self._start()
            if not self._changed.wait_for(lambda: len(self._queue) < ROWS + places, seconds):
                return False
            self._queue.append(call)
            self._changed.notify_all()
            return True

    def _start(self) -> None:
        # The thread sees the context variables of the loop, such as the world of log lines. It is a daemon:
        # a tracker that blocks for ever does not keep the process from ending.
        run = contextvars.copy_context().run
        name = f"fnaccel-{self.name}"
        threading.Thread(target=run, args=(self._work,), name=name, daemon=True).start()
        self._started = True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                call = self._queue.popleft()
                self._changed.notify_all()
            if not call.method:
                return
            self._finished = self._call(call.method, call.args, call.options)
            if call.done is not None:
                call.done.set()
            if call.method == "finish":
                self._over.set()
                return

    def _lose(self, where: str) -> None:
        self.lost += 1
        if self.lost == 1:
            _logger.warning(
                "%s blocks %s: what it can't take is dropped from here on, and counted at the end",
                self.name, where,
            )  # fmt: skip
