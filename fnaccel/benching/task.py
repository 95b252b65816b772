"""The task of a measuring process and its answer. Both are stored as JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

EAGER = "eager"
"""The name for a step without `compile`, next to the scopes of `compile`."""

_TASK, _MEASURED, _FAILED = "task.json", "measured.json", "failed-{}.json"


@attrs.frozen(kw_only=True)
class Task:
    """One scope to measure.

    Attributes:
        loss, model, batch: references.
        recipe: a `Recipe` as YAML.
        scope: `"eager"`, or a scope of `compile`.
        steps: the number of timed steps, after the first step and the warm-up steps.
    """

    loss: str
    model: str
    batch: str
    recipe: str
    scope: str
    steps: int

    def write(self, folder: Path) -> None:
        """Write the task into a folder for the measuring processes."""
        (folder / _TASK).write_text(json.dumps(attrs.asdict(self)))

    @staticmethod
    def read(folder: Path) -> Task:
        """The inverse of `write`."""
        return Task(**json.loads((folder / _TASK).read_text()))


@attrs.frozen(kw_only=True)
class Measured:
    """Time and memory of one scope.

    Attributes:
        first: seconds of the first call, compiling included.
        seconds: the median of one step.
        peak: peak memory in MiB. On the CPU: the growth of the process since before the model was built, the
            compiler included. On an accelerator: allocated memory. With several ranks, the largest.
        losses: the losses of the first few steps.
        draws: whether the loss draws random numbers, as dropout does.
        cache_hits, cache_misses: graphs found and not found in torch's compile cache on disk.
        device: the device type.
    """

    first: float
    seconds: float
    peak: float
    losses: tuple[float, ...] = attrs.field(converter=tuple)
    draws: bool = False
    cache_hits: int = 0
    cache_misses: int = 0
    device: str = "cpu"


@attrs.frozen(kw_only=True)
class Failed:
    """Why a scope was not measured.

    Attributes:
        kind: the class of the error. Empty if the process was killed.
        what: one line.
        where, fix: the parts of a `FnaccelError`, otherwise empty.
        text: the whole error as printed.
        setup: whether it was raised while importing the references. If so, no scope can be measured.
        follows: whether the error only reports that another rank has gone.
    """

    kind: str
    what: str
    where: str = ""
    fix: str = ""
    text: str = ""
    setup: bool = False
    follows: bool = False


Answer = Measured | Failed


def write(folder: Path, answer: Answer, rank: int) -> None:
    """Write an answer for `read`. Rank 0 writes the measurement, and any rank writes its failure."""
    name = _MEASURED if isinstance(answer, Measured) else _FAILED.format(rank)
    (folder / name).write_text(json.dumps(attrs.asdict(answer)))


def read(folder: Path) -> Answer | None:
    """The answer of all ranks, or None without an answer. The failure that caused the other failures wins."""
    failures = [Failed(**_load(file)) for file in sorted(folder.glob(_FAILED.format("*")))]
    if failures:
        return min(failures, key=lambda failure: failure.follows)
    measured = folder / _MEASURED
    return Measured(**_load(measured)) if measured.is_file() else None


def _load(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())
