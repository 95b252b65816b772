"""The base of trackers over another library: a lazy import, a run object, and the ranks that write."""

from __future__ import annotations

import importlib
from typing import Any

from fnaccel.errors import ArgumentError, MissingBackendError
from fnaccel.track.tracker import Ranks


class LibraryTracker:
    """The common part of these trackers. A subclass sets `_run` in `start`, and clears it in `finish`.

    Attributes:
        ranks: the ranks that write: `"main"`, `"all"`, or one by its number.
    """

    def __init__(self, ranks: Ranks = "main") -> None:
        self.ranks: Ranks = ranks
        self._rank: int | None = None
        self._run: Any = None

    @property
    def native(self) -> Any:
        """The run object of the library, or None if the tracker has not started on this rank."""
        return self._run

    def use_rank(self, rank: int) -> None:
        """Add the rank to the name of the run."""
        self._rank = rank

    def _named(self, name: str | None) -> str | None:
        """The name of this rank's run."""
        if self._rank is None:
            return name
        return f"rank{self._rank}" if name is None else f"{name}.rank{self._rank}"

    def _started(self, method: str) -> Any:
        """The run object.

        Raises:
            ArgumentError: before `start`, after `finish`, or on a rank that does not write.
        """
        if self._run is None:
            raise not_started(f"{type(self).__name__}.{method}")
        return self._run

    def _import(self, module: str, extra: str) -> Any:
        """Import a library that a tracker needs.

        Raises:
            MissingBackendError: it is not installed.
        """
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise MissingBackendError(
                f"{module} could not be imported: {error}",
                where=f"{type(self).__name__}.start",
                fix=f"pip install 'fnaccel[{extra}]'",
            ) from error


def not_started(where: str) -> ArgumentError:
    """The error of a tracker that is used before `start`."""
    return ArgumentError(
        "this tracker was not started on this rank",
        where=where,
        fix="use it inside fa.scan(trackers=...) or fa.tracked(...), on a rank that writes",
    )
