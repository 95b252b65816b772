"""Metrics to DVCLive: files in a folder that DVC reads."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fnaccel.track.library import LibraryTracker
from fnaccel.track.media import named_pictures
from fnaccel.track.plain import plain
from fnaccel.track.tracker import Ranks


class DVCLiveTracker(LibraryTracker):
    """Writes each step's metrics to files of DVCLive, one of each name, of text too.

    The config is in `params.yaml`. The options of one call are those of `dvclive.Live.log_metric`, such as
    `timestamp` and `plot`.

    Nothing needs a network. DVCLive empties its folder when a run begins, unless you give `resume=True`. In a
    Git repository with DVC it saves an experiment at the end, unless you give `save_dvc_exp=False`.

    Args:
        directory: its folder is `dvclive` in this one. By default `dvclive` in the working directory.
        offline: no effect: nothing needs a network.
        ranks: the ranks that write. With `"all"` each rank has a folder of its own, such as `dvclive.rank1`.
        options: further arguments of `dvclive.Live`, such as `resume`, `report`, `dvcyaml` and `exp_name`.

    Example:
        >>> from fnaccel.track import DVCLiveTracker
        >>> tracker = DVCLiveTracker(directory="runs/gpt", dvcyaml=None)
        >>> tracker.ranks
        'main'
    """

    _module = "dvclive"
    _starters = ("Live",)
    _writer = "log_metric"
    _closer = "end"

    def __init__(
        self,
        *,
        directory: str | Path | None = None,
        ranks: Ranks = "main",
        offline: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(directory=directory or ".", ranks=ranks, offline=offline)
        self.options = options

    def _begin(self, config: Mapping[str, Any]) -> Any:
        folder = Path(self._directory or "", self._named("dvclive") or "")
        live = self._library.Live(dir=str(folder), **self.options)
        live.log_params(_written(plain(config)))
        return live

    def _at(self, step: int, method: str) -> Any:
        live = self._started(method)
        live.step = step
        return live

    def _write(self, step: int, metrics: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        live = self._at(step, "log")
        numbers, texts = self._numbers_and_texts(metrics)
        for name, value in {**numbers, **texts}.items():
            beside = name.partition("/")[0] in metrics  # a number "lr" of its tree is no branch of "lr/bias"
            live.log_metric(name.replace("/", ".") if beside else name, value, **options)
        live.sync()

    def log_images(self, step: int, name: str, images: object) -> None:
        """Show images. A later step's images of the same name replace them, as DVCLive does."""
        live = self._at(step, "log_images")
        for key, picture in named_pictures(name, images):
            live.log_image(f"{key}.png", picture)

    def log_figure(self, step: int, name: str, figure: object) -> None:
        """Show a figure of matplotlib. A later step's figure of the same name replaces it."""
        self._at(step, "log_figure").log_image(f"{name}.png", figure)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write a table to `tables/NAME/STEP.csv` in the folder of DVCLive."""
        path = Path(self._started("log_table").dir) / "tables" / name / f"{step}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *rows])

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Keep a file by DVC. DVCLive leaves it out, with a warning, if there is no DVC repository."""
        self._started("log_artifact").log_artifact(str(path), name=name, copy=True)


def _written(value: Any) -> Any:
    """The config without None, which DVCLive does not take."""
    if isinstance(value, Mapping):
        return {name: _written(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_written(each) for each in value]
    return "None" if value is None else value
