"""Metrics to Weights & Biases. The package is imported when a run starts, and not before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fnaccel.errors import ArgumentError, MissingBackendError


class WandbTracker:
    """Sends each step's metrics to a run of Weights & Biases.

    A run that the script began with `wandb.init` is used, and left running.

    Args:
        project, name: of the run. By default wandb chooses.
        mode: `"online"`, `"offline"` or `"disabled"`. By default the value of WANDB_MODE.
        options: further arguments of `wandb.init` (https://docs.wandb.ai/ref/python/init).

    Example:
        >>> from fnaccel.track import WandbTracker
        >>> tracker = WandbTracker(project="gpt", mode="disabled")
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), trackers=tracker):
        ...     pass
    """

    def __init__(
        self, *, project: str | None = None, name: str | None = None, mode: str | None = None, **options: Any
    ) -> None:
        self.options: dict[str, Any] = {"project": project, "name": name, "mode": mode, **options}
        self._run: Any = None
        self._began = False

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin the run, or join the run that the script began. `config` is shown beside it.

        Raises:
            MissingBackendError: wandb is not installed.
        """
        try:
            import wandb  # noqa: PLC0415 - optional, and slow to import
        except ImportError as error:
            raise MissingBackendError(
                "the package wandb is not installed",
                where="WandbTracker.start",
                fix="pip install 'fnaccel[wandb]'",
            ) from error
        self._began = wandb.run is None
        if self._began:
            self._run = wandb.init(config=dict(config), **self.options)
        else:
            self._run = wandb.run
            self._run.config.update(dict(config), allow_val_change=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step's metrics.

        Raises:
            ArgumentError: before `start`, or after `finish`.
        """
        if self._run is None:
            raise ArgumentError(
                "this tracker was not started",
                where="WandbTracker.log",
                fix="tracker.start(config) first. fa.scan(trackers=...) does it",
            )
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        """End the run if `start` began it. All metrics are sent when this returns."""
        run, self._run = self._run, None
        if run is not None and self._began:
            run.finish()
