"""Trackers by name: `of("tensorboard")`, `register` for a tracker of your own, and the names installed."""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fnaccel import _lazy
from fnaccel.errors import ArgumentError, UnknownNameError, nearest
from fnaccel.track.library import all_options, check_known
from fnaccel.track.tracker import Tracker

BUILT_IN: dict[str, tuple[str, str | None]] = {
    "aim": ("AimTracker", "aim"),
    "clearml": ("ClearMLTracker", "clearml"),
    "comet": ("CometTracker", "comet_ml"),
    "dvclive": ("DVCLiveTracker", "dvclive"),
    "jsonl": ("JsonlTracker", None),
    "mlflow": ("MLflowTracker", "mlflow"),
    "swanlab": ("SwanLabTracker", "swanlab"),
    "tensorboard": ("TensorBoardTracker", "tensorboard"),
    "trackio": ("TrackioTracker", "trackio"),
    "wandb": ("WandbTracker", "wandb"),
}
"""Name, which is a module in this folder -> class, and the package that it needs."""

_registered: dict[str, Callable[..., Tracker]] = {}


def register(name: str, kind: Callable[..., Tracker]) -> None:
    """Make a tracker of your own known by a name, in recipes and in `fa.Tracking`.

    Args:
        name: its name. A registered name hides a built-in one.
        kind: the class, or a function that makes a tracker. If it has a parameter `directory`, `fa.scan`
            gives it the default directory.

    Raises:
        ArgumentError: the name is empty, is `"all"`, or holds a colon, or the class can't be called or has
            no method `log`.

    Warns:
        UserWarning: another tracker has the name, a built-in one or one that was registered.

    Example:
        >>> class Printer:
        ...     def start(self, config): pass
        ...     def log(self, step, metrics): print(step)
        ...     def finish(self): pass
        >>> fa.track.register("printer", Printer)
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), steps=1, track="printer"):
        ...     pass
        1
    """
    if not isinstance(name, str) or name in ("", "all") or ":" in name or not callable(kind):
        raise ArgumentError(
            f"{name!r} and {kind!r} are no name and class of a tracker",
            where="fa.track.register",
            fix='fa.track.register("mine", MyTracker)',
        )
    if isinstance(kind, type) and not callable(getattr(kind, "log", None)):
        raise ArgumentError(
            f"{kind.__name__} has no method log",
            where=f"fa.track.register({name!r})",
            fix="give a class with start(config), log(step, metrics) and finish()",
        )
    hidden = _registered.get(name, BUILT_IN.get(name))
    if hidden is not None and hidden is not kind:
        whose = "one that was registered before" if name in _registered else "the built-in one"
        warnings.warn(f"the tracker {name!r} takes the place of {whose}", UserWarning, stacklevel=2)
    _registered[name] = kind


def installed() -> tuple[str, ...]:
    """The names of the trackers whose packages are installed. Nothing is imported.

    Example:
        >>> "jsonl" in fa.track.installed()
        True
    """
    present = {
        name
        for name, (_, package) in BUILT_IN.items()
        if package is None or importlib.util.find_spec(package) is not None
    }
    return tuple(sorted(present | _registered.keys()))


def find(name: str, where: str) -> Callable[..., Tracker]:
    """The class of a name.

    Raises:
        UnknownNameError: no tracker has this name.
    """
    if name in _registered:
        return _registered[name]
    if name not in BUILT_IN:
        raise UnknownNameError(
            f"no tracker is called {name!r}",
            where=where,
            fix=nearest(name, {*BUILT_IN, *_registered}) + ', or fa.track.register("mine", MyTracker)',
        )
    return getattr(_lazy.load(f"fnaccel.track.{name}"), BUILT_IN[name][0])


def names_of(tracker: Tracker) -> set[str]:
    """The names of a tracker: its class's name, and the built-in or registered names of its class.

    Example:
        >>> sorted(names_of(fa.track.JsonlTracker("gpt.jsonl")))
        ['JsonlTracker', 'jsonl']
    """
    kind = type(tracker)
    place = (kind.__module__, kind.__name__)
    built_in = {name for name, (cls, _) in BUILT_IN.items() if place == (f"fnaccel.track.{name}", cls)}
    return {kind.__name__, *built_in, *(name for name, each in _registered.items() if each is kind)}


def check_names(options: Iterable[str], names: Iterable[str], where: str) -> None:
    """Check that options by the name of a tracker are for one of the names, or for a built-in tracker.

    A script that takes its trackers from the command line may give options to each that it knows.

    Raises:
        UnknownNameError: another name. Names the nearest.
    """
    known = {*names, *BUILT_IN, *(cls for cls, _ in BUILT_IN.values())}
    known |= {name for name, kind in _registered.items() if isinstance(kind, type)}
    for name in options:
        if name not in known:
            raise UnknownNameError(
                f"no tracker is called {name!r}", where=where, fix=nearest(str(name), known)
            )


def of(
    name: str | Callable[..., Tracker], /, *, default_directory: str | Path | None = None, **options: Any
) -> Tracker:
    """The tracker of a name.

    Args:
        name: `"aim"`, `"clearml"`, `"comet"`, `"dvclive"`, `"jsonl"`, `"mlflow"`, `"swanlab"`,
            `"tensorboard"`, `"trackio"`, `"wandb"`, a name that was registered, or the class itself.
        default_directory: the `directory` of the tracker, if it takes one and the options have none.
        options: the arguments of its class.

    Raises:
        UnknownNameError: no tracker has this name.
        ArgumentError: options that its class does not take.

    Example:
        >>> tracker = fa.track.of("jsonl", directory="runs/gpt")
        >>> tracker.path
        PosixPath('runs/gpt/metrics.jsonl')
    """
    kind = find(name, "fa.track.of") if isinstance(name, str) else name
    if (
        default_directory is not None
        and not {"directory", "path"} & options.keys()
        and _takes_directory(kind)
    ):
        options["directory"] = default_directory
    check_options(name, kind, options)
    try:
        return kind(**options)
    except TypeError as error:
        raise ArgumentError(
            f"the tracker {name!r} can't take these options: {error}",
            where="trackers",
            fix=f"see the arguments of {getattr(kind, '__name__', kind)}",
        ) from error


def check_options(name: object, kind: Callable[..., Tracker], options: Iterable[str]) -> None:
    """Check that a class has these options. One with `**options` checks the rest of them when it starts.

    Raises:
        ArgumentError: it has no parameter of that name. The known options are listed.
    """
    known = all_options(kind)
    if known is not None:
        check_known(f"the tracker {name if isinstance(name, str) else kind.__name__}", options, known)


def _takes_directory(kind: Callable[..., Tracker]) -> bool:
    try:
        return "directory" in inspect.signature(kind).parameters
    except ValueError:  # a class of a compiled module may have no signature
        return False
