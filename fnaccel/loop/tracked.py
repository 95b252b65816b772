"""Trackers around a loop: those of this rank, the steps of `fa.scan`, and `fa.tracked` for loops by hand."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import attrs

from fnaccel.errors import ArgumentError
from fnaccel.loop.autosave import Steps
from fnaccel.loop.progress import open_bar, show_metrics
from fnaccel.track.log import Log, Options
from fnaccel.track.registry import check_names, find, installed, names_of, of
from fnaccel.track.tracker import Artifacts, Media, PerRank, Ranks, Tracker, writes_on
from fnaccel.world.paths import local_path
from fnaccel.world.world import World, current

_LOG = "run.log of fa.tracked"
ByName = str | Mapping[str, Any]
"""A tracker's name, or a mapping of `name` and options."""


def trackers_of_rank(
    trackers: Any, world: World, directory: str | Path | None, where: str
) -> tuple[Tracker, ...]:
    """The trackers that write on this rank. Trackers that are given by name are made.

    Args:
        trackers: one tracker or several, each an object, a name, or a mapping of `name` and options.
        world: the ranks.
        directory: of the run. A tracker by name writes to `logs` in it, or to `runs`.
        where: the location in error messages.

    Raises:
        ArgumentError: an object that is no tracker, or options that a tracker does not take.
        UnknownNameError: no tracker has this name.
        WorldError: a tracker is for a rank that the world does not have.
    """
    return _of_rank(_opened(trackers, directory, where), world)


def _opened(trackers: Any, directory: str | Path | None, where: str) -> list[Tracker]:
    """The trackers of all ranks."""
    folder = Path("runs") if directory is None else local_path(directory, f"{where}, directory=") / "logs"
    if isinstance(trackers, str | Mapping | Tracker) or not isinstance(trackers, Iterable):
        trackers = (trackers,)
    entries: list[Any] = list(trackers)
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
        _by_name(entry, folder, where) if isinstance(entry, str | Mapping) else _checked(entry, where)
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
            fix="trackers=fnaccel.track.JsonlTracker(path), a name, or an object of yours with these methods",
        )
    return tracker


def _of_rank(opened: Iterable[Tracker], world: World) -> tuple[Tracker, ...]:
    """The trackers that write on this rank."""
    trackers = tuple(tracker for tracker in opened if writes_on(tracker, world.rank, world.size))
    for tracker in trackers:
        if getattr(tracker, "ranks", "main") == "all" and isinstance(tracker, PerRank):
            tracker.use_rank(world.rank)
    return trackers


@attrs.frozen
class Bar:
    """A progress bar: its length if it is known, and its first step."""

    total: int | None
    initial: int


def logged(
    taken: Steps, trackers: tuple[Tracker, ...], config: Mapping[str, Any], log_every: int, bar: Bar | None
) -> Steps:
    """Pass steps on, and their metrics to trackers and to a progress bar."""
    with contextlib.ExitStack() as stack:
        progress_bar: Any = None if bar is None else stack.enter_context(open_bar(bar.total, bar.initial))
        log = Log(trackers, config, None if progress_bar is None else show_metrics(progress_bar))
        stack.callback(log.close)
        stack.enter_context(contextlib.closing(taken))
        for state, metrics in taken:
            if progress_bar is not None:
                progress_bar.update()
            if state.step % log_every == 0:
                log.put(state.step, metrics)
            yield state, metrics


class TrackedRun:
    """Several trackers as one, for a loop by hand. `fa.tracked` opens it.

    All ranks call its methods. On a rank where no tracker writes they do nothing. It is a tracker too: give
    it to `fa.scan` if the body of that loop logs images or files. `scan` then neither starts nor ends it.

    Example:
        >>> with fa.tracked("jsonl", directory="runs/gpt") as run:
        ...     for state, metrics in fa.scan(train_step, state, fa.shard(loader), trackers=run):
        ...         pass
        >>> len(fa.track.read_jsonl("runs/gpt/logs/metrics.jsonl"))
        4
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
        """Do nothing: the run was started by `fa.tracked`."""

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
            >>> with fa.tracked("jsonl", directory="runs/gpt") as run:
            ...     run.log(4, {"loss": 0.5, "eval": {"loss": 0.75}})
            ...     run.log({"note": "warm"})
            >>> for record in fa.track.read_jsonl("runs/gpt/logs/metrics.jsonl")[1:]:
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
        """Show images on each tracker that is a `fnaccel.track.Media`."""
        self._log.call(Media, "log_images", step, name, images)

    def log_figure(self, step: int, name: str, figure: object) -> None:
        """Show a figure of matplotlib on each tracker that is a `fnaccel.track.Media`."""
        self._log.call(Media, "log_figure", step, name, figure)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table on each tracker that is a `fnaccel.track.Media`."""
        self._log.call(Media, "log_table", step, name, columns, rows)

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Keep a file on each tracker that is a `fnaccel.track.Artifacts`."""
        self._log.call(Artifacts, "log_artifact", path, name)

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


@contextlib.contextmanager
def tracked(
    trackers: Tracker | ByName | Iterable[Tracker | ByName],
    config: Mapping[str, Any] | None = None,
    *,
    directory: str | Path | None = None,
    world: World | None = None,
) -> Generator[TrackedRun]:
    """Start trackers for a loop by hand, and end them with the `with` block.

    A tracker that raises does not end training: see `fa.scan`.

    Args:
        trackers: as for `fa.scan`.
        config: shown by trackers beside the run.
        directory: of the run. A tracker by name writes to `logs` in it, or without it to `runs`.
        world: the world, if none was started in this context.

    Raises:
        ArgumentError, UnknownNameError, WorldError: as `fa.scan`.

    Example:
        >>> with fa.tracked("jsonl", {"lr": 0.1}, directory="runs/gpt") as run:
        ...     for batch in batches:
        ...         state, metrics = train_step(state, batch)
        ...         run.log(state.step, metrics)
        >>> [record["step"] for record in fa.track.read_jsonl("runs/gpt/logs/metrics.jsonl")[1:]]
        [1, 2, 3]
    """
    there = current(world)
    opened = _opened(trackers, directory, "fa.tracked")
    names = {name for tracker in opened for name in names_of(tracker)}
    run = TrackedRun(_of_rank(opened, there), config or {}, names)
    try:
        yield run
    finally:
        run.close()
