"""`Log`: calls the trackers of this rank, and keeps their errors from ending training."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fnaccel.errors import MissingBackendError
from fnaccel.step.checked_metrics import check_logged
from fnaccel.track.fetcher import Fetcher
from fnaccel.track.tracker import Tracker

_logger = logging.getLogger("fnaccel")


class Log:
    """Sends metrics to trackers and to a progress bar.

    A tracker that raises does not end training: its first error is logged with its traceback, and the number
    of all its errors at the end. The other trackers go on. If the package of a tracker is missing, that
    tracker is left out in the same way. Another error in `start` is raised, since training has not begun
    then.

    Attributes:
        failures: the number of errors of each tracker that raised, by its class's name.
    """

    def __init__(
        self,
        trackers: Iterable[Tracker],
        config: Mapping[str, Any],
        show: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        self._show = show
        self._fetcher = Fetcher()
        self._started: list[Tracker] = []
        self.failures: Counter[str] = Counter()
        try:
            for tracker in trackers:
                self._start(tracker, config)
        except BaseException:
            self._finish()
            raise

    def _start(self, tracker: Tracker, config: Mapping[str, Any]) -> None:
        try:
            tracker.start(config)
        except MissingBackendError as error:
            self.failures[type(tracker).__name__] += 1
            _logger.error("%s is left out: %s", type(tracker).__name__, error)
        else:
            self._started.append(tracker)

    def put(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take one step's metrics, and pass on the metrics that have arrived so far."""
        self._fetcher.put(step, metrics)
        self._pass_on(wait=False)

    def call(self, ability: type, method: str, *args: Any) -> None:
        """Call a method of all trackers that have an ability. Their errors are logged.

        The metrics of earlier steps are written first, because some libraries refuse a step that goes back.
        """
        self._pass_on(wait=True)
        for tracker in self._started:
            if isinstance(tracker, ability):
                self._guarded(tracker, method, *args)

    def _pass_on(self, *, wait: bool) -> None:
        for step, values in self._fetcher.arrived(wait=wait):
            check_logged(values)
            for tracker in self._started:
                self._guarded(tracker, "log", step, values)
            if self._show is not None:
                self._show(values)

    def close(self) -> None:
        """Write the remaining metrics and end the trackers that were started."""
        try:
            self._pass_on(wait=True)
        finally:
            self._finish()
            for name, count in self.failures.items():
                _logger.error("%s raised %d times; training went on", name, count)

    def _finish(self) -> None:
        """End all trackers that were started, even if a Ctrl-C interrupts one of them."""
        with contextlib.ExitStack() as stack:
            while self._started:
                stack.callback(self._guarded, self._started.pop(0), "finish")

    def _guarded(self, tracker: Tracker, method: str, *args: Any) -> None:
        """Call a method of a tracker. Its errors are logged."""
        try:
            getattr(tracker, method)(*args)
        except Exception:
            name = type(tracker).__name__
            self.failures[name] += 1
            if self.failures[name] == 1:
                _logger.exception("%s.%s() raised; training goes on", name, method)
