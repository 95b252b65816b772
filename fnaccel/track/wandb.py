"""Metrics to Weights & Biases. The package is imported when a run starts, and not before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fnaccel.track.library import ValueTracker


class WandbTracker(ValueTracker):
    """Sends each step's metrics to a run of Weights & Biases.

    A run that the script began with `wandb.init` is used, and left running.

    Args:
        project, run_name: of the run. By default wandb chooses.
        directory: the folder for its local files, which wandb calls `dir`.
        offline: True writes to this machine, as `mode="offline"`. Nothing needs a network or a key then.
            False: as `mode="online"`.
        ranks: the ranks that write. With `"all"` each rank has a run of its own.
        options: further arguments of `wandb.init` (https://docs.wandb.ai/ref/python/init), such as `entity`,
            `tags` and `mode`: `"online"`, `"offline"` or `"disabled"`, by default the value of WANDB_MODE.

    The options of one call are those of `wandb.Run.log`, such as `commit`.

    Example:
        >>> from fnaccel.track import WandbTracker
        >>> tracker = WandbTracker(project="gpt", mode="disabled")
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), track=tracker):
        ...     pass
    """

    _module = "wandb"
    _online_option = ("mode", "online", "offline")

    def _current(self) -> Any:
        return self._library.run

    def _begin(self, config: Mapping[str, Any]) -> Any:
        options = self._options_with_folder("dir")  # wandb takes another folder if this one is missing
        if self._name is None:
            self._name = options.pop("name", None)
        name = self._named(self._name)
        return self._library.init(config=dict(config), project=self._project, name=name, **options)

    def _join(self, config: Mapping[str, Any]) -> None:
        self.add_config(config)

    def add_config(self, config: Mapping[str, Any]) -> None:
        """Add entries to the config of the run."""
        self._run.config.update(dict(config), allow_val_change=True)

    def _text(self, text: str) -> str:
        return text

    def log_figure(self, step: int, name: str, figure: object) -> None:
        """Show a figure of matplotlib as an image."""
        self._started("log_figure")
        self._put(step, {name: self._library.Image(figure)})

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Keep a file as an artifact of type `file`."""
        run = self._started("log_artifact")
        artifact = self._library.Artifact(name or Path(path).name, type="file")
        artifact.add_file(str(path))
        run.log_artifact(artifact)
