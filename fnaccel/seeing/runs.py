"""Runs as a report shows them: the columns of a JSONL log, step by step."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from fnaccel.errors import ArgumentError
from fnaccel.track.jsonl import read_jsonl
from fnaccel.world.paths import local_path

_LARGEST = 10**300
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
        paths: of `JsonlTracker`. Of a folder all logs with a step in it, at any depth.

    Raises:
        ArgumentError: no logs, or a log without a step.
    """
    files: list[Path] = []
    for path in [local_path(path, "fnaccel report") for path in paths]:
        inside = [file for file in path.rglob("*.jsonl") if _is_log(file)] if path.is_dir() else [path]
        if not inside or not inside[0].is_file():
            raise _no_log(path)
        files += sorted(inside)
    if not files:
        raise _no_log("an empty list")
    return [read_run(file, name) for file, name in zip(files, _names(files), strict=True)]


def _number(value: float) -> float:
    """The value as a float that a chart can hold. Differences of the largest floats overflow."""
    if abs(value) > _LARGEST:
        return math.inf if value > 0 else -math.inf
    return 0.0 if abs(value) < 1 / _LARGEST else float(value)


def _no_log(path: object) -> ArgumentError:
    return ArgumentError(
        f"there is no log in {path}",
        where="fnaccel report",
        fix="give the file of a JsonlTracker, or a folder with one: fa.scan(trackers='jsonl')",
    )


def _is_log(file: Path) -> bool:
    """Whether a file of a folder is a log with a step. Data sets and runs that never began are not."""
    with file.open("rb") as lines:
        return any(b'"step"' in line and _is_step(line) for line in lines)


def _is_step(line: bytes) -> bool:
    try:
        record: Any = json.loads(line)
    except ValueError:
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
    """Read one log. If a run went back to a checkpoint, its newer steps replace those of before.

    Args:
        path: of `JsonlTracker`. The run may still be going on.
        name: in the report.

    Raises:
        ArgumentError: no log, or one without a step.
    """
    config: dict[str, Any] = {}
    rows: list[tuple[int, float, dict[str, Any]]] = []
    restarts: list[int] = []
    began = False
    seconds = 0.0
    for record in read_jsonl(Path(path)):
        if "config" in record:
            config = record["config"] or config
            began = True
            continue
        if not all(isinstance(record.get(name), int | float) for name in ("step", "time")):
            raise ArgumentError(
                f"a line without a step and a time: {str(record)[:80]}",
                where=str(path),
                fix="give a file that JsonlTracker wrote",
            )
        step, time = int(record["step"]), float(record["time"])
        if began and rows:
            while rows and rows[-1][0] >= step:
                rows.pop()
            restarts = [*(first for first in restarts if first < step), step]
        elif rows:
            seconds += max(0.0, time - rows[-1][1])
        began = False
        rows.append((step, time, record))
    if not rows:
        raise ArgumentError(
            f"{path} holds no step",
            where="fnaccel report",
            fix="wait until the run has logged one (log_every= of fa.scan says when)",
        )
    columns: dict[str, Points] = {}
    for step, _, record in rows:
        for metric, value in record.items():
            if metric not in ("step", "time") and isinstance(value, int | float):
                columns.setdefault(metric, []).append((step, _number(value)))
    speed: Points = [
        (second, (second - first) / (later - earlier))
        for (first, earlier, _), (second, later, _) in itertools.pairwise(rows)
        if later > earlier and second > first and second not in restarts
    ]
    if speed:
        columns["steps_per_second"] = speed
    return Run(
        name=name or Path(path).stem,
        config=config,
        columns=columns,
        restarts=tuple(restarts),
        seconds=seconds,
    )
