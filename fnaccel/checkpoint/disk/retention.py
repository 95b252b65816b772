"""Which checkpoints stay once a new one is committed: the newest, and the best by a metric in them."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from fnaccel.checkpoint.disk.publish import Checkpoint, checkpoints, discard
from fnaccel.checkpoint.format import manifest
from fnaccel.errors import ArgumentError, nearest, require, require_counts

Mode = Literal["min", "max"]
# a manifest has one line for each entry: that of its metrics, if there is one, is before that of its metadata
_LINE, _NEXT = b'"metrics": ', b'"metadata": '


@attrs.frozen
class Best:
    """A metric, whether its smallest or its largest value is best, and how many checkpoints stay for it."""

    metric: str
    mode: Mode = "min"
    keep: int = 1

    def check(self, where: str) -> None:
        """Raise ArgumentError for a mode or a number that can't be."""
        require(self.mode in ("min", "max"), f"mode={self.mode!r}", where, '"min" or "max"')
        require_counts(where, keep_best=self.keep)

    def better(self, value: float, than: float, *, by: float = 0.0) -> bool:
        """Whether a value is better than another one. NaN is not."""
        return value < than - by if self.mode == "min" else value > than + by


@attrs.frozen
class Metrics:
    """The metrics of one checkpoint.

    Attributes:
        values: by name. None: not finite, so that it is no best value.
        best: what they are compared by.
        evaluations: the state of the evaluations of `fa.scan`, by their names.
    """

    values: Mapping[str, float | None] = attrs.field(factory=dict)
    best: tuple[Best, ...] = ()
    evaluations: Mapping[str, Any] = attrs.field(factory=dict)


def metrics_of(checkpoint: Path) -> Metrics:
    """The metrics in the manifest of a checkpoint. None are in that of an older one, or of a damaged one."""
    try:
        with (checkpoint / manifest.FILE).open("rb") as lines:
            ahead = itertools.takewhile(lambda line: not line.startswith(_NEXT), lines)
            line = next((line for line in ahead if line.startswith(_LINE)), _LINE + b"{}")
        record = json.loads(line[len(_LINE) :].rstrip(b",\n"))
        return Metrics(**record | {"best": tuple(Best(**best) for best in record.get("best", ()))})
    except (OSError, ValueError, TypeError):
        return Metrics()


def best_steps(existing: Iterable[Checkpoint]) -> set[int]:
    """The steps of the checkpoints that stay for a metric, as the newest with that metric was saved."""
    found = {each.step: metrics_of(each.path) for each in existing}
    latest = {best.metric: best for metrics in found.values() for best in metrics.best}
    return {step for best in latest.values() for step in _ranked(found, best)[: best.keep]}


def _ranked(found: Mapping[int, Metrics], best: Best) -> list[int]:
    """The steps of the checkpoints that hold a metric, the best first. Of equal ones the first."""
    sign = 1 if best.mode == "min" else -1
    values = {step: metrics.values.get(best.metric) for step, metrics in found.items()}
    held = [(sign * value, step) for step, value in values.items() if value is not None]
    return [step for _, step in sorted(held)]


def best(
    directory: str | os.PathLike[str], metric: str | None = None, *, mode: Mode | None = None
) -> Path | None:
    """The checkpoint under a root with the best value of a metric. None if no checkpoint holds it.

    Args:
        directory: the root that `fa.save` or `fa.scan` was given. It need not exist.
        metric: its name, such as `"eval/loss"`. By default the one that the newest checkpoint was saved with.
        mode: `"min"` or `"max"`. By default as it was saved.

    Raises:
        ArgumentError: no checkpoint says which metric, or which mode.
        OSError: the root can't be listed.

    Example:
        >>> for step, loss in enumerate([0.5, 0.25, 0.75]):
        ...     path = fa.save("runs/gpt", state, step=step, metrics={"loss": loss}, best="loss")
        >>> fa.checkpoint.best("runs/gpt").name
        'step-0000000001'
    """
    paths = {each.step: each.path for each in checkpoints(directory)}
    found = {step: metrics_of(path) for step, path in paths.items()}
    saved = [one for step in reversed(found) for one in found[step].best]
    chosen = next((one for one in saved if metric in (None, one.metric)), None)
    if chosen is None and metric is not None and mode is not None:
        chosen = Best(metric)
    if chosen is None and found:
        raise ArgumentError(
            f"no checkpoint was saved with best={metric!r}"
            if metric
            else "no checkpoint was saved with best=",
            where="fa.checkpoint.best",
            fix='name the metric and the mode: fa.checkpoint.best(directory, "eval/loss", mode="min")',
        )
    if chosen is None:
        return None
    chosen = attrs.evolve(chosen, mode=mode or chosen.mode)
    chosen.check("fa.checkpoint.best")
    return next((paths[step] for step in _ranked(found, chosen)), None)


def given_metrics(
    metrics: Mapping[str, Any] | Metrics | None, best: str | None, mode: Mode, keep_best: int, where: str
) -> Metrics:
    """The arguments of a save as one record.

    Raises:
        ArgumentError: a metric is no number, or `best` is none of them.
    """
    if isinstance(metrics, Metrics):
        return metrics
    values = {name: finite(value, name, where) for name, value in (metrics or {}).items()}
    if best is None:
        return Metrics(values)
    fix = nearest(best, values) if values else f"metrics={{{best!r}: value}}"
    require(best in values, f"best={best!r} is none of metrics=", where, fix)
    chosen = Best(best, mode, keep_best)
    chosen.check(where)
    return Metrics(values, (chosen,))


def finite(value: Any, name: str, where: str) -> float | None:
    """A number, or a tensor of one element, as a float. None if it is not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(
            f"the metric {name!r} is {value!s:.60}, which is no number", where=where, fix="leave it out"
        ) from None
    return number if math.isfinite(number) else None


@attrs.frozen
class Retention:
    """Keep the newest `keep` checkpoints, all whose step is a multiple of `keep_every`, and the best."""

    keep: int | None = None
    keep_every: int | None = None

    def check(self, where: str) -> None:
        """Raise ArgumentError for numbers that keep nothing."""
        require_counts(where, keep=self.keep, keep_every=self.keep_every)
        if self.keep_every is not None and self.keep is None:
            raise ArgumentError(
                f"keep_every={self.keep_every} without keep=, which keeps all",
                where=where,
                fix="say how many of the newest stay besides: keep=2",
            )

    def apply(self, root: Path, written: int) -> None:
        """Remove old checkpoints, but never the step just written, nor one that is being read.

        If one can't be removed now, the next save tries again.
        """
        if self.keep is None:
            return
        # later ones are of a run that was left: nothing of this one gives way to them
        existing = [checkpoint for checkpoint in checkpoints(root) if checkpoint.step <= written]
        old = existing[: -self.keep]
        kept = {written} | best_steps(existing) if old else {written}
        for checkpoint in old:
            multiple = self.keep_every is not None and checkpoint.step % self.keep_every == 0
            if checkpoint.step not in kept and not multiple:
                with contextlib.suppress(OSError):
                    discard(checkpoint.path, unless_read=True)
