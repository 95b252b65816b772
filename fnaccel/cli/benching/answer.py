"""The task of a measuring process and its answer. Both pass between processes as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from fnaccel.errors import FnaccelError
from fnaccel.launch.failure import follows, shown

EAGER = "eager"
"""The name for a step without `compile`, next to the scopes of `compile`."""


@attrs.frozen(kw_only=True)
class Task:
    """One scope to measure."""

    loss: str
    model: str
    batch: str
    recipe: str  # a `Recipe` as YAML
    scope: str  # "eager", or a scope of `compile`
    steps: int  # how many are timed, after the first step and the warm-up


@attrs.frozen(kw_only=True)
class Measured:
    """Time and memory of one scope."""

    first: float  # seconds of the first call, compiling included
    seconds: float  # the median of one step
    peak: float  # in MiB, as `Memory` measures it, the largest of all ranks
    losses: tuple[float, ...] = attrs.field(converter=tuple)  # of the first few steps
    draws: bool = False  # whether the loss draws random numbers, as dropout does
    cache_hits: int = 0  # graphs found in torch's compile cache on disk
    cache_misses: int = 0
    device: str = "cpu"


@attrs.frozen(kw_only=True)
class Failed:
    """Why a scope was not measured."""

    kind: str  # the class of the error, empty if the process was killed
    what: str  # one line
    text: str  # the whole error as printed
    setup: bool = False  # raised while importing the references: no scope can be measured
    follows: bool = False  # the error only reports that another rank has gone


Answer = Measured | Failed


def failure_of(error: Exception, *, setup: bool) -> Failed:
    """The failure of a rank that raised `error`. An error of fnaccel in the set-up needs no traceback."""
    kind, ours = type(error).__name__, isinstance(error, FnaccelError)
    text = f"{kind}: {error}" if setup and ours else shown(error, error.__traceback__)
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "it said nothing")
    what = line if ours else f"{kind}: {line}"
    return Failed(kind=kind, what=what, text=text, setup=setup, follows=follows(error))


def write_answer(folder: Path, answer: Answer, rank: int) -> None:
    """Write a rank's answer for `answer_in`."""
    (folder / f"{type(answer).__name__}-{rank}.json").write_text(json.dumps(attrs.asdict(answer)))


def answer_in(folder: Path) -> Answer | None:
    """The answer of all ranks, or None without an answer. The failure that caused the other failures wins."""
    failures = [Failed(**json.loads(file.read_text())) for file in sorted(folder.glob("Failed-*.json"))]
    if failures:
        return min(failures, key=lambda failure: failure.follows)
    return next((Measured(**json.loads(file.read_text())) for file in folder.glob("Measured-*.json")), None)
