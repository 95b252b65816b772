"""The share of each kind of work in the traces of `fa.profile`, rank by rank."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

from fnaccel.errors import ArgumentError
from fnaccel.seeing.profile import PHASE
from fnaccel.world.paths import local_path
from fnaccel.world.progress_marks import STAGE

_FILE = re.compile(r"rank(\d+)\.(\d+)\.pt\.trace\.json(\.gz)?")
_COMMUNICATION = re.compile(
    r"^(gloo:|nccl:|c10d::|c10d_functional::|_c10d_functional::)|nccl.*kernel", re.IGNORECASE
)
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_DATA = f"{PHASE}data"
_TIMES = ("wall", "compute", "communication", "hidden", "data", "idle")


@attrs.frozen(kw_only=True)
class Summary:
    """The time of one rank in the recorded steps. Times are in milliseconds for each step.

    Attributes:
        rank: which.
        steps: how many steps were recorded.
        wall: the time of a step.
        compute: operators on the CPU, or kernels on a device.
        communication: collectives, and waiting for other ranks in them, while nothing is computed.
        hidden: collectives while something is computed.
        data: waiting for a batch.
        idle: the rest: Python between operators, and code of the script.
        phases: the time of each phase of a step.
        stages: of the stages of a pipeline on this rank, the times of forward and backward. Waiting for other
            stages counts.

    Example:
        >>> with fa.profile("trace", wait=0, active=1):
        ...     for state, metrics in fa.scan(train_step, state, fa.shard(loader)):
        ...         pass
        >>> summary, = fa.seeing.summarize("trace")
        >>> summary.steps, sorted(summary.phases)
        (1, ['backward', 'data', 'forward', 'gradients', 'outside', 'update'])
    """

    rank: int
    steps: int
    wall: float
    compute: float
    communication: float
    hidden: float
    data: float
    idle: float
    phases: dict[str, float]
    stages: dict[int, dict[str, float]] = attrs.field(factory=dict)

    @property
    def busy(self) -> float:
        """The time of a step without waiting for other ranks."""
        return self.wall - self.communication


def summarize(directory: str | os.PathLike[str]) -> list[Summary]:
    """Read the traces of all ranks.

    If several kinds of work overlap, a moment counts once. On the CPU waiting for data comes first, then
    compute, then communication. With a device, its kernels come first, then communication, then waiting for
    data.

    Args:
        directory: of `fa.profile`.

    Returns:
        One for each rank, by rank.

    Raises:
        ArgumentError: no traces, or a file that is no trace of `fa.profile`.

    Example:
        >>> with fa.profile("trace", wait=0, active=1):
        ...     for state, metrics in fa.scan(train_step, state, fa.shard(loader)):
        ...         pass
        >>> [(summary.rank, summary.steps) for summary in fa.seeing.summarize("trace")]
        [(0, 1)]
    """
    files: dict[int, list[Path]] = defaultdict(list)
    for path in sorted(local_path(directory, "fa.seeing.summarize").glob("rank*.pt.trace.json*")):
        match = _FILE.fullmatch(path.name)
        if match is not None:
            files[int(match[1])].append(path)
    if not files:
        raise ArgumentError(
            f"there are no traces in {directory}",
            where="fnaccel trace summarize",
            fix="record some: fa.scan(watch=fa.Watch(profile=fa.profile(directory))), with more steps "
            "than skip_first + wait + warmup",
        )
    return [_summary(rank, files[rank]) for rank in sorted(files)]


def _summary(rank: int, paths: list[Path]) -> Summary:
    """The mean of a step of one rank, over all of its recordings."""
    totals: Counter[str] = Counter()
    for path in paths:
        totals.update(_totals(path))
    scale = 1e-3 / totals["steps"]  # traces are in microseconds
    times = {name: totals[name] * scale for name in _TIMES}
    phases: dict[str, float] = defaultdict(float)
    stages: dict[int, dict[str, float]] = defaultdict(dict)
    for name in sorted(name for name in totals if name.startswith(PHASE)):
        phase, _, stage = name.removeprefix(PHASE).partition(STAGE)
        phases[phase] += totals[name] * scale
        if stage:
            stages[int(stage)][phase] = totals[name] * scale
    return Summary(rank=rank, steps=totals["steps"], phases=dict(phases), stages=dict(stages), **times)


def _totals(path: Path) -> dict[str, Any]:
    """The number of steps in a trace, and the microseconds of each kind of work and of each phase."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events: list[dict[str, Any]] = [e for e in json.loads(raw)["traceEvents"] if e.get("ph") == "X"]
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        raise _no_trace(path) from error
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    if not steps:
        raise _no_trace(path)
    has_device = any(event.get("cat") in _DEVICE for event in events)
    order = ("compute", "communication", _DATA) if has_device else (_DATA, "compute", "communication")
    begin, end = min(map(_begin, steps)), max(map(_end, steps))
    marks = [(begin, 1, "step"), (end, -1, "step")]
    totals: dict[str, Any] = dict.fromkeys(_TIMES, 0.0)
    for event in events:
        kind = _kind(event, has_device)
        if kind is not None:
            marks += [(_begin(event), 1, kind), (_end(event), -1, kind)]
            totals.setdefault(kind, 0.0)
    phases = [name for name in totals if name.startswith(PHASE)]
    running: Counter[str] = Counter()
    for (at, change, kind), (following, _, _) in pairwise(sorted(marks)):
        running[kind] += change
        if not running["step"]:
            continue
        share = next((each for each in order if running[each]), "idle")
        totals["wall"] += following - at
        totals["data" if share == _DATA else share] += following - at
        if share == "compute" and running["communication"]:
            totals["hidden"] += following - at
        for phase in phases:
            if running[phase]:
                totals[phase] += following - at
    return {"steps": len(steps), **totals}


def _kind(event: dict[str, Any], has_device: bool) -> str | None:
    """The phase or the kind of work of an event, or None if it is neither."""
    name, category = event["name"], event.get("cat")
    if name.startswith(PHASE):
        return name
    is_work = category in _DEVICE if has_device else category == "cpu_op"
    if _COMMUNICATION.search(name):
        return "communication" if is_work or not has_device else None
    return "compute" if is_work else None


def _begin(event: dict[str, Any]) -> float:
    return float(event["ts"])


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event.get("dur", 0.0))


def _no_trace(path: Path) -> ArgumentError:
    return ArgumentError(
        f"{path} is no trace of fa.profile, or was cut off while it was written",
        where="fnaccel trace summarize",
        fix="record it again: fa.scan(watch=fa.Watch(profile=fa.profile(directory)))",
    )
