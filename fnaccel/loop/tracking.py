"""`Tracking`: which trackers write, how often, and what they are told of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs

from fnaccel import _lazy
from fnaccel.errors import ArgumentError, require
from fnaccel.loop.evaluating import Every, check_every
from fnaccel.track.registry import find, installed, of
from fnaccel.track.tracker import PerRank, Tracker, writes_on
from fnaccel.world.paths import local_path
from fnaccel.world.world import World

ByName = str | Mapping[str, Any]
"""A tracker's name, or a mapping of `name` and options."""


@attrs.frozen(init=False)
class Tracking:
    """Trackers with their options, for `fa.scan(track=)` and `fa.tracked`.

    Args:
        trackers: each an object, a name such as `"tensorboard"`, or a mapping of `name` and options. `"all"`
            stands for those installed. Rank 0 writes, or the ranks that a tracker's `ranks` says.
        every: `fa.scan` writes each so many steps, or `"epoch"`: the last step of each. The loss of a row is
            the mean over the steps since the row before, by their weights. Other metrics are those of its
            step. In `fa.tracked` the loop itself says which.
        config: shown by trackers beside the run. `fa.scan` adds the plan and the environment.
        report: write an HTML page about the run here at its end, and a JSONL log beside it. See
            `fnaccel report` for several runs, and for one that was cut off.
        directory: of the run. A tracker by name writes to `logs` in it. None: that of `fa.scan(save=)`, or
            without one the tracker writes to `runs`.

    Raises:
        ArgumentError: an option of another type, or an object that is no tracker.

    Example:
        >>> track = fa.Tracking("jsonl", every=2, config={"lr": 0.1}, report="run.html")
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), track=track):
        ...     pass
        >>> [row["step"] for row in fa.track.read_jsonl("runs/metrics.jsonl")[1:]]
        [2]
    """

    trackers: tuple[Tracker | ByName, ...]
    every: Every
    config: Mapping[str, Any]
    report: str | Path | None
    directory: str | Path | None

    def __init__(
        self,
        *trackers: Tracker | ByName,
        every: Every = 1,
        config: Mapping[str, Any] | None = None,
        report: str | Path | None = None,
        directory: str | Path | None = None,
    ) -> None:
        where = "fa.Tracking"
        check_every(where, every, needed=True)
        require(
            config is None or isinstance(config, Mapping),
            f"config={config!r:.60}",
            where,
            'config={"lr": 0.1}',
        )
        folder = None if directory is None else local_path(directory, f"{where}(directory=)")
        for tracker in trackers:
            if not isinstance(tracker, str | Mapping):
                _checked(tracker, where)
        self.__attrs_init__(trackers, every, config or {}, report, folder)  # pyright: ignore[reportAttributeAccessIssue]

    def opened(self, where: str, directory: Path | None = None) -> list[Tracker]:
        """The trackers of all ranks. Those given by name are made.

        Args:
            where: the location in error messages.
            directory: of the run's checkpoints.

        Raises:
            ArgumentError: options that a tracker does not take, or a report that can't be written.
            UnknownNameError: no tracker has this name.
        """
        run = self.directory or directory
        opened = _opened(self.trackers, Path("runs") if run is None else Path(run) / "logs", where)
        if self.report is not None:
            opened.append(_lazy.load("fnaccel.seeing.report").ReportTracker(self.report))
        return opened


Track = Tracker | ByName | Iterable[Tracker | ByName] | Tracking | None
"""What `fa.scan(track=)` and `fa.tracked` take."""


def as_tracking(track: Track) -> Tracking:
    """The record of one tracker, of several, of none, or itself."""
    if track is None or isinstance(track, Tracking):
        return track or Tracking()
    if isinstance(track, str | Mapping | Tracker) or not isinstance(track, Iterable):
        return Tracking(cast("Tracker | ByName", track))
    return Tracking(*track)


def _opened(entries: tuple[Tracker | ByName, ...], folder: Path, where: str) -> list[Tracker]:
    named = [
        {"name": entry} if isinstance(entry, str) else entry
        for entry in entries
        if isinstance(entry, str | Mapping)
    ]
    for number, entry in enumerate(named):
        if entry in named[:number]:
            raise ArgumentError(
                f"the tracker {entry.get('name')!r} is given twice, with the same options",
                where=where,
                fix="give it once; or a directory or path of its own to each",
            )
    every = any(isinstance(entry, str) and entry == "all" for entry in entries)
    opened = [
        _by_name(entry, folder, where) if isinstance(entry, str | Mapping) else entry
        for entry in entries
        if not (isinstance(entry, str) and entry == "all")
    ]
    if every:
        for name in installed():
            kind = find(name, where)
            if not any(type(tracker) is kind for tracker in opened):
                opened.append(of(name, default_directory=folder))
    return opened


def _by_name(entry: ByName, folder: Path, where: str) -> Tracker:
    options: dict[str, Any] = {"name": entry} if isinstance(entry, str) else dict(entry)
    if "name" not in options:
        raise ArgumentError(
            f"the options {options} name no tracker", where=where, fix='{"name": "tensorboard", ...}'
        )
    name = options.pop("name")
    if isinstance(name, str):
        find(name, where)
    return _checked(of(name, default_directory=folder, **options), where)


def _checked(tracker: object, where: str) -> Tracker:
    if isinstance(tracker, type) or not isinstance(tracker, Tracker):
        made = not isinstance(tracker, type)
        name = type(tracker).__name__ if made else f"the class {tracker.__name__}"
        methods = {"start": "start(config)", "log": "log(step, metrics)", "finish": "finish()"}
        lacks = [text for method, text in methods.items() if not hasattr(tracker, method)]
        raise ArgumentError(
            f"{name} is no tracker: " + (f"it lacks {' and '.join(lacks)}" if lacks else "make an instance"),
            where=where,
            fix="fnaccel.track.JsonlTracker(path), a name, or an object of yours with these methods",
        )
    return tracker


def of_rank(opened: Iterable[Tracker], world: World) -> tuple[Tracker, ...]:
    """The trackers that write on this rank.

    Raises:
        WorldError: a tracker is for a rank that the world does not have.
    """
    trackers = tuple(tracker for tracker in opened if writes_on(tracker, world.rank, world.size))
    for tracker in trackers:
        if getattr(tracker, "ranks", "main") == "all" and isinstance(tracker, PerRank):
            tracker.use_rank(world.rank)
    return trackers
