"""`Log`: calls the trackers of this rank, and keeps their errors from ending training."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fnaccel.errors import ArgumentError, MissingBackendError
from fnaccel.step.checked_metrics import check_read
from fnaccel.track import calls
from fnaccel.track.calls import LoopCalls, calls_of
from fnaccel.track.fetcher import Fetcher
from fnaccel.track.library import LeftOut, check_log_options
from fnaccel.track.registry import names_of
from fnaccel.track.tracker import Tracker
from fnaccel.tree import Tree

Options = Mapping[str, Mapping[str, Any]]
"""Options of one call of `log`, by the name of a tracker."""

_logger = logging.getLogger("fnaccel")


class Log:
    """Sends metrics to trackers and to a progress bar.

    A tracker that raises does not end training: its first error is logged with its traceback, and the number
    of all its errors at the end. The other trackers go on. If the package of a tracker is missing, that
    tracker is left out in the same way. Another error in `start` is raised, since training has not begun
    then. A tracker that blocks does not stop training: see `fnaccel.track.calls`.

    A tracker with `takes_tensors = True`, as the run of `fa.tracked`, gets the metrics as they are, at once.
    Then its rows and those of the loop's body are in the order of the calls.
    """

    def __init__(
        self,
        trackers: Iterable[Tracker],
        config: Mapping[str, Any],
        show: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        self._show = show
        self._fetcher = Fetcher()
        self._left_out = LeftOut("the log")
        self._runs: list[Tracker] = []
        self._open: list[LoopCalls] = []
        self._calls: list[LoopCalls] = []
        self._absent: Counter[str] = Counter()
        self._unheard: set[str] = set()
        try:
            for tracker in trackers:
                self._start(tracker, config)
        except BaseException:
            self._finish()
            raise

    @property
    def failures(self) -> Counter[str]:
        """The number of errors of each tracker that raised, by its class's name."""
        failures = Counter(self._absent)
        for each in self._calls:
            failures[each.name] += each.errors
        return +failures

    def _start(self, tracker: Tracker, config: Mapping[str, Any]) -> None:
        name = type(tracker).__name__
        try:
            tracker.start(_copy(config))
        except MissingBackendError as error:
            self._absent[name] += 1
            _logger.error("%s is left out: %s", name, error)
        except OSError as error:
            if error.filename is None:  # of a network
                raise
            raise ArgumentError(
                f"{name} can't write {error.filename}: {error.strerror or error}",
                where="trackers",
                fix="give a folder that can be written, on a disk with free space, or leave the tracker out",
            ) from error
        except SystemExit as error:
            raise ArgumentError(
                f"{name}.start() called sys.exit({error.code!r})",
                where="trackers",
                fix="leave the tracker out, or raise an error in its place",
            ) from error
        else:
            if getattr(tracker, "takes_tensors", False):
                self._runs.append(tracker)
            else:
                self._open.append(calls_of(tracker))
                self._calls.append(self._open[-1])

    def put(self, step: int, metrics: Mapping[str, Any], options: Options | None = None) -> None:
        """Take one step's metrics, and pass on the metrics that have arrived so far.

        Args:
            step: the step.
            metrics: numbers, tensors, text, other objects, and mappings of these.
            options: of this call, by the name of a tracker.

        Raises:
            ArgumentError: a tracker does not take such an option.
        """
        chosen = [_chosen(each.tracker, options) for each in self._open] if options else []
        for run in self._runs:
            run.log(step, metrics)
        if self._runs and not self._open and self._show is None:
            return
        left_out = self._fetcher.put(step, metrics, chosen)
        for name, why in left_out.items() if self._open else ():
            self._left_out.warn(name, why)
        self._pass_on(wait=False)

    def call(self, method: str, *args: Any) -> None:
        """Call a method of all trackers that have it. Their errors are logged.

        The metrics of earlier steps are written first, because some libraries refuse a step that goes back.
        """
        self._pass_on(wait=True)
        able = [each for each in self._open if hasattr(each.tracker, method)]
        for each in able:
            each.show(method, *args)
        if self._open and not able and method.startswith("log_") and method not in self._unheard:
            self._unheard.add(method)
            names = ", ".join(each.name for each in self._open)
            _logger.warning("%s() writes nothing: no such method in %s", method, names)

    def _pass_on(self, *, wait: bool) -> None:
        for row in self._fetcher.arrived(wait=wait):
            numbers = {name: value for name, value in row.values.items() if isinstance(value, float)}
            check_read(numbers.get("weight", 0.0))
            chosen = row.options or [{}] * len(self._open)
            for each, options in zip(self._open, chosen, strict=True):
                each.log(row.step, dict(row.values), options)
            if self._show is not None:
                self._show(numbers)

    def close(self) -> None:
        """Write the remaining metrics and end the trackers that were started."""
        try:
            self._pass_on(wait=True)
        finally:
            self._finish()
            for name, count in self.failures.items():
                _logger.error("%s raised %d times; training went on", name, count)
            for each in self._calls:
                if each.lost:
                    _logger.error(
                        "%s blocked: %d of its rows were dropped; training went on", each.name, each.lost
                    )

    def _finish(self) -> None:
        """End all trackers that were started, even if a Ctrl-C interrupts one of them."""
        deadline = time.monotonic() + calls.LIMIT
        started, self._open = self._open, []
        with contextlib.ExitStack() as stack:  # its last callback is called first
            for each in started:
                stack.callback(each.join, deadline)
            for each in started:
                stack.callback(each.end)


def _chosen(tracker: Tracker, options: Options) -> dict[str, Any]:
    """The options of one tracker.

    Raises:
        ArgumentError: its `log` does not take one of them.
    """
    names = names_of(tracker)
    chosen = {key: value for name in options if name in names for key, value in options[name].items()}
    check_log_options(tracker, chosen)
    return chosen


def _copy(value: Tree) -> Any:
    """A copy of nested mappings and lists: a tracker may change its config, and the next one has another."""
    if isinstance(value, Mapping):
        return {name: _copy(each) for name, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value
