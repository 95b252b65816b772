"""Trackers around a loop: around the steps of `fa.scan`, and `fa.tracked` for loops by hand."""

from __future__ import annotations

import contextlib
import math
import operator
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import attrs
import torch

from fnaccel.errors import ArgumentError, moved_arguments, require
from fnaccel.loop.evaluating import Evaluations, Every, Steps, Turns, Work
from fnaccel.loop.progress import open_bar, show_metrics, write_line
from fnaccel.loop.tracking import Track, as_tracking, of_rank
from fnaccel.state import TrainState
from fnaccel.track.log import Log, Options
from fnaccel.track.registry import check_names, names_of
from fnaccel.track.tracker import Ranks, Tracker
from fnaccel.world.world import World, current

_LOG = "run.log of fa.tracked"


@attrs.frozen
class Bar:
    """A progress bar: its length if known, the first state, the last epoch, and whether a run goes on."""

    total: int | None
    state: TrainState
    epochs: int | None
    resumed: bool

    def open(self) -> Any:
        """The bar, on the screen, below a line that says where a resumed run goes on."""
        opened, data = open_bar(self.total, self.state.step), self.state.data
        if self.resumed:
            write_line(f"resumed at step {self.state.step}, {data.samples} samples into epoch {data.epoch}")
        return opened


class MeanLoss:
    """The mean loss of the steps since it was read last, by their weights.

    On an accelerator it is added up there. A step of weight 0 counts for nothing.
    """

    def __init__(self) -> None:
        self._total: Any = 0.0
        self._weight: Any = 0.0

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of a step."""
        loss, weight = metrics["loss"], metrics["weight"]
        if isinstance(weight, torch.Tensor):
            loss = torch.where(weight > 0, loss, torch.zeros_like(loss))
        elif not weight:
            return
        self._total, self._weight = self._total + loss * weight, self._weight + weight

    def read(self) -> Any:
        """The mean, which stays where the losses are. NaN if no step counted."""
        mean = (
            self._total / self._weight if isinstance(self._weight, torch.Tensor) or self._weight else math.nan
        )
        self._total = self._weight = 0.0
        return mean


class EpochLines:
    """A line for each epoch above a progress bar: the mean loss, what was evaluated, and seconds.

    Args:
        epochs: the last epoch, if the loop has one.
        work: of the loop.
    """

    def __init__(self, epochs: int | None, work: Work) -> None:
        self._epochs, self._turns = epochs, Turns("epoch", work)
        self._mean, self._since = MeanLoss(), time.monotonic()

    def add(self, state: TrainState, metrics: Mapping[str, Any], evaluated: Mapping[str, Any]) -> None:
        """Take a step. The loss is read once an epoch has ended."""
        self._mean.add(metrics)
        if not self._turns.come(state):
            return
        count = f"{state.data.epoch}/{self._epochs}" if self._epochs else f"{state.data.epoch}"
        numbers = {"loss": float(self._mean.read())} | {
            name: value for name, value in evaluated.items() if isinstance(value, float)
        }
        shown = [f"epoch {count}", *(f"{name} {value:.4g}" for name, value in numbers.items())]
        write_line("  ".join([*shown, f"{time.monotonic() - self._since:.0f} s"]))
        self._since = time.monotonic()


def logged(
    taken: Steps,
    trackers: tuple[Tracker, ...],
    config: Mapping[str, Any],
    every: Every,
    bar: Bar | None,
    evaluations: Evaluations,
) -> Steps:
    """Pass steps on, and their metrics to trackers and to a progress bar."""
    with contextlib.ExitStack() as stack:
        progress_bar: Any = None if bar is None else stack.enter_context(bar.open())
        lines = None if bar is None else EpochLines(bar.epochs, evaluations.work)
        also = [record.kept_by.metric for record in evaluations.records.values()]
        log = Log(trackers, config, None if progress_bar is None else show_metrics(progress_bar, also))
        stack.callback(log.close)
        evaluations.log = log.put
        stack.enter_context(contextlib.closing(taken))
        turns = Turns(every, evaluations.work)
        mean = None if every == 1 else MeanLoss()
        for state, metrics in taken:
            if mean is not None:
                mean.add(metrics)
            if lines is not None and progress_bar is not None:
                progress_bar.update()
                lines.add(state, metrics, evaluations.found)
            if turns.come(state):
                log.put(state.step, metrics if mean is None else metrics | {"loss": mean.read()})
            elif evaluations.found:
                log.put(state.step, evaluations.found)
            yield state, metrics


class TrackedRun:
    """Several trackers as one, for a loop by hand. `fa.tracked` opens it.

    All ranks call its methods. On a rank where no tracker writes they do nothing. It is a tracker too: give
    it to `fa.scan` if the body of that loop logs images or files. `scan` then neither starts nor ends it.

    Example:
        >>> with fa.tracked("jsonl") as run:
        ...     for state, metrics in fa.scan(train_step, state, fa.shard(loader), track=run):
        ...         pass
        >>> [sorted(record["config"]) for record in fa.track.read_jsonl("runs/metrics.jsonl")[:2]]
        [[], ['environment', 'plan']]
    """

    in_loop = True  # each tracker of the run has its own thread
    # it copies tensors itself, so that rows of `fa.scan` and rows of the loop's body keep their order
    takes_tensors = True

    def __init__(
        self, trackers: tuple[Tracker, ...], config: Mapping[str, Any], names: Iterable[str] = ()
    ) -> None:
        self._trackers = trackers
        self._names = frozenset(names)
        self._step: int | None = None
        self._count = 0
        self._log = Log(trackers, config)

    @property
    def ranks(self) -> Ranks:
        """`"all"` on ranks with trackers of their own. Other ranks copy no metrics for this run."""
        return "all" if self._trackers else "main"

    @property
    def trackers(self) -> tuple[Tracker, ...]:
        """The trackers that write on this rank."""
        return self._trackers

    @property
    def failures(self) -> dict[str, int]:
        """The number of errors of each tracker that raised, by its class's name, without rows in a queue."""
        return dict(self._log.failures)

    def start(self, config: Mapping[str, Any]) -> None:
        """Give the plan and the environment of `fa.scan` to trackers that `fa.tracked` has started."""
        self._log.call("add_config", config)

    @overload
    def log(self, step: int, metrics: Mapping[str, Any], *, options: Options | None = None) -> None: ...

    @overload
    def log(self, metrics: Mapping[str, Any], /, *, options: Options | None = None) -> None: ...

    def log(
        self,
        step: int | Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
        *,
        options: Options | None = None,
    ) -> None:
        """Write one step's metrics: numbers, tensors of one element on any device, and text.

        Tensors are read when their copies have arrived, so that the step does not wait for the device. Values
        in a nested mapping get names such as `eval/loss`. A tracker of yours gets other objects as they are.
        Each name that a tracker can't take is logged once as a warning.

        Args:
            step: the step. Without it, `run.log(metrics)` takes the step of the last call that had one. If no
                call had one, the run counts its calls: 0, 1, 2.
            metrics: the metrics by name.
            options: further arguments for a tracker's own log call, by the name of the tracker, such as
                `{"mlflow": {"synchronous": True}}`. Those of a built-in tracker that the run does not have
                are ignored.

        Raises:
            LossError: a metric `weight` is negative, infinite or NaN.
            UnknownNameError: no tracker has such a name.
            ArgumentError: a tracker takes no such option, or the step or the metrics are of the wrong kind.

        Example:
            >>> with fa.tracked("jsonl") as run:
            ...     run.log(4, {"loss": 0.5, "eval": {"loss": 0.75}})
            ...     run.log({"note": "warm"})
            >>> for record in fa.track.read_jsonl("runs/metrics.jsonl")[1:]:
            ...     print(record["step"], sorted(record.keys() - {"step", "time"}))
            4 ['eval/loss', 'loss']
            4 ['note']
        """
        given, values = _row_of(step, metrics)
        check_names(_checked_options(options), self._names, _LOG)
        last = self._step if given is None else given
        if self._trackers:
            self._log.put(self._count if last is None else last, values, options)
        self._step = last
        self._count += 1

    def finish(self) -> None:
        """Do nothing: the run ends with the `with` block."""

    def log_images(self, step: int, name: str, images: object) -> None:
        """Show images on each tracker that has this method."""
        self._log.call("log_images", step, name, images)

    def log_figure(self, step: int, name: str, figure: object) -> None:
        """Show a figure of matplotlib on each tracker that has this method."""
        self._log.call("log_figure", step, name, figure)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table on each tracker that has this method."""
        self._log.call("log_table", step, name, columns, rows)

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Keep a file on each tracker that has this method."""
        self._log.call("log_artifact", path, name)

    def close(self) -> None:
        """Write the remaining metrics and end the trackers."""
        self._log.close()


def _row_of(first: Any, second: Any) -> tuple[int | None, Mapping[str, Any]]:
    """The step, if there is one, and the metrics of one call of `log`.

    Raises:
        ArgumentError: the step is no whole number, or the metrics are no mapping.
    """
    step, metrics = (None, first) if second is None else (first, second)
    wrong = step is not None and (isinstance(step, bool) or not hasattr(step, "__index__"))
    if wrong or not isinstance(metrics, Mapping):
        raise ArgumentError(
            f"the step is {step!r:.60}" if wrong else f"the metrics are {type(metrics).__name__}, no mapping",
            where=_LOG,
            fix='run.log(state.step, {"loss": loss}), or without a step run.log({"loss": loss})',
        )
    return None if step is None else operator.index(step), metrics


def _checked_options(options: Any) -> Options:
    """The options of one call of `log`.

    Raises:
        ArgumentError: they are no mappings by the names of trackers.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(each, Mapping) for each in options.values()):
        raise ArgumentError(
            f"options={options!r:.60} is no mapping of names and options",
            where=_LOG,
            fix='options={"mlflow": {"synchronous": True}}',
        )
    return options


_NOW_IN_TRACKING = 'fa.tracked(fa.Tracking("jsonl", config={"lr": 0.1}, directory="runs/gpt"))'


@moved_arguments("fa.tracked", config=_NOW_IN_TRACKING, directory=_NOW_IN_TRACKING)
@contextlib.contextmanager
def tracked(track: Track, *, world: World | None = None) -> Generator[TrackedRun]:
    """Start trackers for a loop by hand, and end them with the `with` block.

    A tracker that raises does not end training: see `fa.scan`.

    Args:
        track: as for `fa.scan`.
        world: the world, if none was started in this context.

    Raises:
        ArgumentError, UnknownNameError, WorldError: as `fa.scan`. Also for `every=`: here the loop says which
            steps are written.

    Example:
        >>> with fa.tracked(fa.Tracking("jsonl", config={"lr": 0.1}, directory="runs/gpt")) as run:
        ...     for batch in batches:
        ...         state, metrics = train_step(state, batch)
        ...         run.log(state.step, metrics)
        >>> [record["step"] for record in fa.track.read_jsonl("runs/gpt/logs/metrics.jsonl")[1:]]
        [1, 2, 3]
    """
    there = current(world)
    tracking = as_tracking(track)
    require(
        tracking.every == 1,
        f"every={tracking.every}, where the loop says which steps are written",
        "fa.tracked",
        f"leave it out, and write: if state.step % {tracking.every} == 0: run.log(state.step, metrics). Or "
        f"give it to the loop: fa.scan(..., track=fa.Tracking(run, every={tracking.every}))",
    )
    opened = tracking.opened("fa.tracked")
    names = {name for tracker in opened for name in names_of(tracker)}
    run = TrackedRun(of_rank(opened, there), tracking.config, names)
    try:
        yield run
    finally:
        run.close()
