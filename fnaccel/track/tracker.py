"""The protocols of trackers: `Tracker`, and the optional abilities `Media`, `Artifacts` and `PerRank`.

The trackers themselves have a file each in this folder. `registry.py` knows them by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from fnaccel.errors import ArgumentError, WorldError

Ranks = Literal["main", "all"] | int
"""The ranks on which a tracker writes: the main one, all of them, or one by its number."""


@runtime_checkable
class Tracker(Protocol):
    """A destination of metrics. By default rank 0 calls it, and the other ranks do not.

    `start` is called in the loop, and the other methods in a thread of the tracker, in order. So a tracker
    that blocks does not stop training. An attribute `in_loop = True` calls all of them in the loop.

    An attribute `ranks` of the object changes the ranks: `"main"`, `"all"`, or the number of a rank. An
    attribute `native` is the run object of the library behind a tracker. Further abilities are protocols of
    `fnaccel.track`: `Media` and `Artifacts`.

    Example:
        >>> class Printer:
        ...     def start(self, config): print("start")
        ...     def log(self, step, metrics): print(step, sorted(metrics))
        ...     def finish(self): print("finish")
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), track=[Printer()]):
        ...     pass
        start
        1 ['loss', ...]
        finish
    """

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin a run, or go on with it. `config` is shown beside it.

        An error here is raised before training begins.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one step's metrics: floats, and text or other objects as they were given.

        Further parameters are options of one call: `run.log(..., options=)` of `fa.tracked` gives them.
        """
        ...

    def finish(self) -> None:
        """End the run. Everything is written when this returns."""
        ...


@runtime_checkable
class Media(Protocol):
    """A tracker that shows images, figures and tables.

    Example:
        >>> from fnaccel.track import Media, TensorBoardTracker
        >>> isinstance(TensorBoardTracker("runs/a"), Media)
        True
    """

    def log_images(self, step: int, name: str, images: object) -> None:
        """Show one image or several.

        Args:
            step: the step.
            name: the name of the images.
            images: a tensor (channels, height, width), an array (height, width, channels), either with a
                first dimension for several images, an image of Pillow, or a sequence of these. Channels are
                1, 3 or 4, or that dimension is left out. Values are uint8, or floats from 0 to 1.
        """
        ...

    def log_figure(self, step: int, name: str, figure: object) -> None:
        """Show a figure of matplotlib."""
        ...

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table: the names of its columns, and its rows."""
        ...


@runtime_checkable
class Artifacts(Protocol):
    """A tracker that keeps files beside a run.

    Example:
        >>> from fnaccel.track import Artifacts, WandbTracker
        >>> isinstance(WandbTracker(), Artifacts)
        True
    """

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Keep a copy of the file `path`, by default under its own name."""
        ...


@runtime_checkable
class PerRank(Protocol):
    """A tracker that gives each rank a run or a file of its own, if `ranks` is `"all"`.

    Example:
        >>> from fnaccel.track import JsonlTracker
        >>> tracker = JsonlTracker("gpt.jsonl", ranks="all")
        >>> tracker.use_rank(2)
        >>> tracker.path
        PosixPath('gpt.rank2.jsonl')
    """

    def use_rank(self, rank: int) -> None:
        """Add the rank to the name of the run or file. Called before `start`."""
        ...


def writes_on(tracker: Tracker, rank: int, size: int) -> bool:
    """Whether a tracker writes on this rank.

    Raises:
        ArgumentError: its `ranks` is neither `"main"`, `"all"` nor a number.
        WorldError: the world has no such rank.
    """
    ranks: Any = getattr(tracker, "ranks", "main")
    if ranks in ("main", "all"):
        return ranks == "all" or rank == 0
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 0:
        raise ArgumentError(
            f"ranks={ranks!r} of {type(tracker).__name__} names no ranks",
            where="track=",
            fix='ranks="main", ranks="all", or the number of a rank',
        )
    if ranks >= size:
        raise WorldError(
            f"ranks={ranks} of {type(tracker).__name__}, and the world has {size} ranks",
            where="track=",
            fix=f"a rank from 0 to {size - 1}",
        )
    return rank == ranks
