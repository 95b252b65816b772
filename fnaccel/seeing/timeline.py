"""The share of each kind of work in the traces of `fa.profile`, rank by rank."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from fnaccel.errors import ArgumentError
from fnaccel.seeing.profile import PHASE
from fnaccel.world.paths import local_path

_FILE = re.compile(r"rank(\d+)\.(\d+)\.pt\.trace\.json(\.gz)?")
_COMMUNICATION = re.compile(
    r"^(gloo:|nccl:|c10d::|c10d_functional::|_c10d_functional::)|nccl.*kernel", re.IGNORECASE
)
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Spans = list[tuple[float, float]]


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
    return [_merged(rank, [_read(path, rank) for path in files[rank]]) for rank in sorted(files)]


def _merged(rank: int, cycles: list[Summary]) -> Summary:
    """The mean of several cycles, by their steps."""
    steps = sum(cycle.steps for cycle in cycles)

    def mean(values: Iterable[float]) -> float:
        return sum(v * cycle.steps for v, cycle in zip(values, cycles, strict=True)) / steps

    names = ("wall", "compute", "communication", "hidden", "data", "idle")
    times = {name: mean(getattr(cycle, name) for cycle in cycles) for name in names}
    phases = {
        name: mean(cycle.phases.get(name, 0.0) for cycle in cycles) for c in cycles for name in c.phases
    }
    return Summary(rank=rank, steps=steps, phases=phases, **times)


def _read(path: Path, rank: int) -> Summary:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events: list[dict[str, Any]] = [e for e in json.loads(raw)["traceEvents"] if e.get("ph") == "X"]
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        raise _no_trace(path) from error
    windows = _spans(e for e in events if e["name"].startswith("ProfilerStep#"))
    if not windows:
        raise _no_trace(path)
    begin, end, steps = min(windows)[0], max(last for _, last in windows), len(windows)
    wall = [(begin, end)]
    communication = [e for e in events if _COMMUNICATION.search(e["name"])]
    kernels = [e for e in events if e.get("cat") in _DEVICE]
    if kernels:
        communication = [e for e in communication if e.get("cat") in _DEVICE]
    others = {id(e) for e in communication}
    work = kernels or [e for e in events if e.get("cat") == "cpu_op"]
    compute = _within(_spans(e for e in work if id(e) not in others), wall)
    sent = _within(_spans(communication), wall)
    waits = _within(_spans(e for e in events if e["name"] == f"{PHASE}data"), wall)
    if kernels:
        hidden = _within(sent, compute)
        alone = _without(sent, compute)
        waits = _without(_without(waits, compute), sent)
    else:
        compute = _without(compute, waits)
        hidden = _within(sent, compute)
        alone = _without(_without(sent, compute), waits)
    phases: dict[str, Spans] = defaultdict(list)
    for event in events:
        if event["name"].startswith(PHASE):
            phases[event["name"].removeprefix(PHASE)] += _spans([event])
    milliseconds = 1e-3 / steps  # traces are in microseconds
    used = _length(compute) + _length(alone) + _length(waits)
    return Summary(
        rank=rank,
        steps=steps,
        wall=(end - begin) * milliseconds,
        compute=_length(compute) * milliseconds,
        communication=_length(alone) * milliseconds,
        hidden=_length(hidden) * milliseconds,
        data=_length(waits) * milliseconds,
        idle=(end - begin - used) * milliseconds,
        phases={name: _length(_within(spans, wall)) * milliseconds for name, spans in phases.items()},
    )


def _no_trace(path: Path) -> ArgumentError:
    return ArgumentError(
        f"{path} is no trace of fa.profile, or was cut off while it was written",
        where="fnaccel trace summarize",
        fix="record it again: fa.scan(watch=fa.Watch(profile=fa.profile(directory)))",
    )


def _spans(events: Iterable[dict[str, Any]]) -> Spans:
    return [(float(e["ts"]), float(e["ts"]) + float(e.get("dur", 0.0))) for e in events]


def _joined(spans: Spans) -> Spans:
    """Spans without overlaps, in order."""
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _within(spans: Spans, limits: Spans) -> Spans:
    """The parts of spans that lie in `limits`.

    Example:
        >>> _within([(0, 4), (3, 6)], [(1, 2), (5, 9)])
        [(1, 2), (5, 6)]
    """
    parts: Spans = []
    first, second = _joined(spans), _joined(limits)
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            parts.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return parts


def _without(spans: Spans, others: Spans) -> Spans:
    """The parts of spans that lie outside of `others`.

    Example:
        >>> _without([(0, 4)], [(1, 2)])
        [(0, 1), (2, 4)]
    """
    gaps: Spans = []
    at = float("-inf")
    for begin, end in _joined(others):
        gaps.append((at, begin))
        at = end
    return _within(spans, [*gaps, (at, float("inf"))])


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in _joined(spans))
