"""Metrics to Aim: a local repository, or an Aim server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fnaccel.track.library import ValueTracker
from fnaccel.track.plain import markdown_table, plain


class AimTracker(ValueTracker):
    """Writes each step's metrics to a repository of Aim. The config is the run's `config`.

    Text is an `aim.Text`. The options of one call are those of `aim.Run.track`, such as `context`.

    Args:
        project: the experiment's name. By default Aim chooses.
        run_name: the name of the run. By default Aim chooses.
        directory: the folder of the repository, or `aim://HOST:PORT` of a server. A folder needs no network.
            By default the working directory.
        offline: True: a folder, and not a server.
        ranks: the ranks that write. With `"all"` each rank has a run of its own.
        options: further arguments of `aim.Run`, such as `run_hash`, `system_tracking_interval` and
            `capture_terminal_logs`.

    Example:
        >>> from fnaccel.track import AimTracker
        >>> tracker = AimTracker(project="gpt", directory="runs/gpt", system_tracking_interval=None)
        >>> tracker.ranks
        'main'
    """

    _module = "aim"
    _starters = ("Run",)
    _writer = "track"
    _closer = "close"

    def _folder(self, directory: Any) -> Any:
        return directory if _is_server(directory) else super()._folder(directory)

    def _servers(self) -> dict[str, Any]:
        return {"directory": self._directory if _is_server(self._directory) else None}

    def _begin(self, config: Mapping[str, Any]) -> Any:
        repository = None if self._directory is None else str(self._directory)
        if repository is not None and "://" not in repository:
            Path(repository).mkdir(parents=True, exist_ok=True)
        run = self._library.Run(repo=repository, experiment=self._project, **self.options)
        name = self._named(self._name)
        if name is not None:
            run.name = name
        run["config"] = plain(config)
        return run

    def _put(self, step: int, values: dict[str, Any], **options: Any) -> None:
        for name, value in values.items():
            self._run.track(value, name=name, step=step, **options)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table as text."""
        self._started("log_table")
        self._put(step, {name: self._text(markdown_table(columns, rows))})

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Keep a file in the folder `aim_artifacts` of the repository, or where `set_artifacts_uri` says."""
        run = self._started("log_artifact")
        if run.artifacts_uri is None:
            folder = Path(self._directory or ".").absolute() / "aim_artifacts"
            run.set_artifacts_uri(folder.as_uri())
        run.log_artifact(str(path), name or Path(path).name, block=True)


def _is_server(directory: Any) -> bool:
    return str(directory).startswith("aim://")
