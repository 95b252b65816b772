"""Trackers and the progress bar around a loop: their check, and steps whose metrics are passed on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from fnaccel.errors import ArgumentError
from fnaccel.loop.autosave import Steps
from fnaccel.loop.progress import open_bar, show_metrics
from fnaccel.track.tracker import Log, Tracker


def check_trackers(trackers: Any) -> tuple[Tracker, ...]:
    """The trackers as a tuple. One tracker alone is taken too.

    Raises:
        ArgumentError: an object that is no tracker.
    """
    if isinstance(trackers, Tracker) or not isinstance(trackers, Iterable):
        trackers = (trackers,)
    several = tuple(trackers)
    for tracker in several:
        if isinstance(tracker, type) or not isinstance(tracker, Tracker):
            name = f"the class {tracker.__name__}" if isinstance(tracker, type) else type(tracker).__name__
            raise ArgumentError(
                f"{name} is no tracker: it lacks start(config), log(step, metrics) and finish()",
                where="fa.scan(trackers=)",
                fix="trackers=fnaccel.track.JsonlTracker(path), or an object of yours with these methods",
            )
    return several


@attrs.frozen
class Bar:
    """A progress bar: its length if it is known, and its first step."""

    total: int | None
    initial: int


def logged(
    taken: Steps, trackers: tuple[Tracker, ...], config: Mapping[str, Any], log_every: int, bar: Bar | None
) -> Steps:
    """Pass steps on, and their metrics to trackers and to a progress bar."""
    with contextlib.ExitStack() as stack:
        progress_bar: Any = None if bar is None else stack.enter_context(open_bar(bar.total, bar.initial))
        log = Log(trackers, config, None if progress_bar is None else show_metrics(progress_bar))
        stack.callback(log.close)
        stack.enter_context(contextlib.closing(taken))
        for state, metrics in taken:
            if progress_bar is not None:
                progress_bar.update()
            if state.step % log_every == 0:
                log.put(state.step, metrics)
            yield state, metrics
