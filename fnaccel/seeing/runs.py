"""Runs as a report shows them: the columns of a JSONL log, step by step."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from fnaccel.errors import ArgumentError
from fnaccel.track.jsonl import records_of
from fnaccel.world.paths import local_path

_logger = logging.getLogger("fnaccel")
_LARGEST = 10**300
_LONGEST = 1 << 24
"""Bytes of a line."""
_MOST = 20_000
"""Points of a column in memory."""
_COLUMNS = 1_000
"""Columns of a log, and restarts."""
_SPEED = "steps_per_second"
Points = list[tuple[float, float]]
"""(step, value), in order of steps."""


@attrs.frozen(kw_only=True)
class Run:
    """One log.

    Attributes:
        name: of the file, or of its folder if that says more.
        config: the newest configuration of the log.
        columns: the values of each metric.
        restarts: the first step after each restart.
        seconds: from the first step of the log to the last. Breaks between restarts do not count.
    """

    name: str
    config: dict[str, Any]
    columns: dict[str, Points]
    restarts: tuple[int, ...]
    seconds: float

    @property
    def steps(self) -> int:
        """The newest step."""
        return int(max((points[-1][0] for points in self.columns.values()), default=0))


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> list[Run]:
    """The runs in files and folders, with names that differ.

    Args:
        paths: of `JsonlTracker`. Of a folder all logs with a step in it, at any depth. A log of a folder that
            can't be read is named in a warning, and left out.

    Raises:
        ArgumentError: no logs, or a log without a step.
    """
    runs: list[tuple[Path, Run]] = []
    for path in [local_path(path, "fnaccel report") for path in paths]:
        runs += _of_folder(path) if path.is_dir() else [(path, _of_file(path))]
    if not runs:
        raise _no_log("an empty list")
    names = _names([file for file, _ in runs])
    return [attrs.evolve(run, name=name) for (_, run), name in zip(runs, names, strict=True)]


def _of_file(path: Path) -> Run:
    if not path.is_file():
        raise _no_log(path)
    return read_run(path)


def _of_folder(folder: Path) -> list[tuple[Path, Run]]:
    """The runs of the logs in a folder."""
    runs: list[tuple[Path, Run]] = []
    errors: list[ArgumentError] = []
    for file in sorted(folder.rglob("*.jsonl")):
        try:
            if file.is_file() and _is_log(file):
                runs.append((file, read_run(file)))
        except (ArgumentError, OSError) as error:
            if isinstance(error, ArgumentError):
                errors.append(error)
            what = error.what if isinstance(error, ArgumentError) else error.strerror
            _logger.warning("%s is left out: %s", file, what)
    if not runs:
        raise errors[0] if errors else _no_log(folder)
    return runs


def _number(value: float) -> float:
    """The value as a float that a chart can hold. Differences of the largest floats overflow."""
    if abs(value) > _LARGEST:
        return math.inf if value > 0 else -math.inf
    return 0.0 if abs(value) < 1 / _LARGEST else float(value)


def _no_log(path: object) -> ArgumentError:
    return ArgumentError(
        f"there is no log in {path}",
        where="fnaccel report",
        fix="give the file of a JsonlTracker, or a folder with one: fa.scan(track='jsonl')",
    )


def _is_log(file: Path) -> bool:
    """Whether a file of a folder is a log with a step. Data sets and runs that never began are not."""
    with file.open("rb") as lines:
        return any(
            b'"step"' in line and _is_step(line) for line in iter(lambda: lines.readline(_LONGEST), b"")
        )


def _is_step(line: bytes) -> bool:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and {"step", "time"} <= record.keys()


def _names(files: list[Path]) -> list[str]:
    """The shortest ends of paths that tell the files apart, and that say something."""
    first = 2 if {file.stem for file in files} & {"report", "metrics"} else 1
    for depth in range(first, max(len(file.resolve().parts) for file in files) + 1):
        names = ["/".join(file.resolve().with_suffix("").parts[-depth:]) for file in files]
        if len(set(names)) == len(names):
            break
    else:
        names = [f"{file} ({number})" for number, file in enumerate(files, 1)]
    return names


def read_run(path: str | os.PathLike[str], name: str | None = None) -> Run:
    """Read one log line by line. If a run went back to a checkpoint, its newer steps replace those of before.

    Of a long log the smallest, the largest and the last values are kept, so that it fits in memory.

    Args:
        path: of `JsonlTracker`. The run may still be going on.
        name: in the report.

    Raises:
        ArgumentError: no log, or one without a step.
    """
    log = _Log()
    for record in records_of(Path(path)):
        if "config" in record:
            log.begin(record["config"], more=record.get("more") is True)
        else:
            log.add(record, str(path))
    if log.last is None:
        raise ArgumentError(
            f"{path} holds no step",
            where="fnaccel report",
            fix="wait until the run has logged one (fa.Tracking(every=) says when)",
        )
    return Run(
        name=name or Path(path).stem,
        config=log.config,
        columns=log.columns,
        restarts=tuple(log.restarts),
        seconds=log.seconds,
    )


class _Log:
    """A log while it is read: what of it stays in memory."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.columns: dict[str, Points] = {}
        self.restarts: list[int] = []
        self.seconds = 0.0
        self.last: tuple[int, float] | None = None
        self._began = False

    def begin(self, config: dict[str, Any], *, more: bool) -> None:
        """Take the first line of a run, or more of its config."""
        self.config = {**self.config, **config} if more else config or self.config
        self._began = self._began or not more

    def add(self, record: dict[str, Any], where: str) -> None:
        """Take the line of a step."""
        step, time = self._place(record, where)
        if self._began and self.last is not None:
            self._restart(step)
        elif self.last is not None:
            self._speed(step, time)
        self._began = False
        self.last = step, time
        for metric, value in record.items():
            if metric not in ("step", "time") and isinstance(value, int | float):
                self._put(metric, step, _number(value))

    @staticmethod
    def _place(record: dict[str, Any], where: str) -> tuple[int, float]:
        values = [record.get(name) for name in ("step", "time")]
        step, time = (
            _number(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
            for value in values
        )
        if not (math.isfinite(step) and math.isfinite(time)):
            raise ArgumentError(
                f"a line without a step and a time: {record!a:.80}",
                where=where,
                fix="give a file that JsonlTracker wrote",
            )
        return int(step), time

    def _restart(self, step: int) -> None:
        for points in self.columns.values():
            while points and points[-1][0] >= step:
                points.pop()
        self.columns = {metric: points for metric, points in self.columns.items() if points}
        while self.restarts and self.restarts[-1] >= step:
            self.restarts.pop()
        self.restarts.append(step)
        del self.restarts[:-_COLUMNS]

    def _speed(self, step: int, time: float) -> None:
        before, earlier = self.last or (step, time)
        self.seconds += max(0.0, time - earlier)
        if time > earlier and step > before:
            self._put(_SPEED, step, (step - before) / (time - earlier))

    def _put(self, metric: str, step: int, value: float) -> None:
        points = self.columns.get(metric)
        if points is None:
            # a name that can't be written, or too many names: no log of a training
            if len(self.columns) >= _COLUMNS or any("\ud800" <= char <= "\udfff" for char in metric):
                return
            points = self.columns[metric] = []
        points.append((step, value))
        if len(points) >= _MOST:
            points[:] = _thinned(points)


def _thinned(points: Points) -> Points:
    """About half of the points: of each eight the smallest, the largest, an infinite one and the last."""
    kept: Points = []
    for first in range(0, len(points), 8):
        group = points[first : first + 8]
        finite = [at for at, (_, value) in enumerate(group) if math.isfinite(value)]
        chosen = {len(group) - 1}
        if finite:
            chosen |= {min(finite, key=lambda at: group[at][1]), max(finite, key=lambda at: group[at][1])}
        chosen |= {*[at for at in range(len(group)) if at not in finite][:1]}
        kept += [group[at] for at in sorted(chosen)]
    return kept
