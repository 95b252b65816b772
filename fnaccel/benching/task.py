"""What one process is asked to measure, and what it answers: values that go through files as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

EAGER = "eager"
"""The name of no scope at all, beside those of `compile`."""

_TASK, _MEASURED, _FAILED = "task.json", "measured.json", "failed-{}.json"


@attrs.frozen(kw_only=True)
class Task:
    """One scope to measure.

    Attributes:
        loss, model, batch: references.
        recipe: strategy, precision, optimizer and the rest, as YAML.
        scope: `"eager"`, or one of `compile`.
        steps: how many are timed, after the first and a few warm-ups.
    """

    loss: str
    model: str
    batch: str
    recipe: str
    scope: str
    steps: int

    def write(self, folder: Path) -> None:
        """Leave it in a folder for the process that is started with it."""
        (folder / _TASK).write_text(json.dumps(attrs.asdict(self)))

    @staticmethod
    def read(folder: Path) -> Task:
        """The inverse of `write`."""
        return Task(**json.loads((folder / _TASK).read_text()))


@attrs.frozen(kw_only=True)
class Measured:
    """What a scope took.

    Attributes:
        first: seconds of the first call, compiling included.
        seconds: of one step, the median.
        peak: MiB at most, above what the process held before the model was built, the compiler's own
            included; on accelerators what was allocated there. Of several ranks, the most.
        losses: of the first few steps.
        draws: whether the loss draws random numbers, as dropout does.
        cache_hits, cache_misses: graphs that torch's compile cache on disk held, and did not.
        device: what it ran on.
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
        kind: the class of the error, empty where the process was ended from outside.
        what: one line.
        where, fix: of an error of ours, or empty.
        text: the whole of it, as it is printed.
        setup: whether it came before anything was to be measured: then no scope can be.
        follows: whether it only says that another rank has gone.
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
    """Leave an answer where `read` looks: what was measured is rank 0's, a failure any rank's."""
    name = _MEASURED if isinstance(answer, Measured) else _FAILED.format(rank)
    (folder / name).write_text(json.dumps(attrs.asdict(answer)))


def read(folder: Path) -> Answer | None:
    """The answer of all ranks, the failure that the others followed from first; None where there is none."""
    failures = [Failed(**_load(file)) for file in sorted(folder.glob(_FAILED.format("*")))]
    if failures:
        return min(failures, key=lambda failure: failure.follows)
    measured = folder / _MEASURED
    return Measured(**_load(measured)) if measured.is_file() else None


def _load(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())
