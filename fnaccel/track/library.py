"""The base of trackers over another library: a lazy import, a run object, and the ranks that write."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from fnaccel.errors import ArgumentError, MissingBackendError, install_line, nearest
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

    def _check_options(self, options: Iterable[str], *functions: Callable[..., Any]) -> None:
        """Check that the functions of the library take these options of the user.

        Raises:
            ArgumentError: one of them has no parameter of that name. The known options are listed.
        """
        known = own_options(type(self)).union(*map(own_options, functions))
        for name in options:
            if name not in known:
                raise unknown_option(type(self).__name__, name, known)

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
                fix=install_line(extra),
            ) from error


def own_options(function: Callable[..., Any]) -> set[str]:
    """The names of the parameters of a class or function, without `**options`."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}


def unknown_option(tracker: str, name: str, known: Iterable[str]) -> ArgumentError:
    """The error of an option that a tracker does not have."""
    return ArgumentError(f"{tracker} has no option {name!r}", where="trackers", fix=nearest(name, known))


def check_offline(tracker: str, offline: bool | None, online: dict[str, Any]) -> None:
    """Check `offline` of a tracker, and that no other option asks for a server at the same time.

    Raises:
        ArgumentError: `offline` is neither a bool nor None, or it is True beside an option for a server.
    """
    asks = [f"{name}={value!r}" for name, value in online.items() if value]
    if offline is None or (isinstance(offline, bool) and not (offline and asks)):
        return
    raise ArgumentError(
        f"{tracker}: offline={offline!r}" + (f" and {asks[0]}" if asks else ""),
        where="trackers",
        fix="leave one of them out" if asks else "offline=True, or False",
    )


def not_started(where: str) -> ArgumentError:
    """The error of a tracker that is used before `start`."""
    return ArgumentError(
        "this tracker was not started on this rank",
        where=where,
        fix="use it inside fa.scan(trackers=...) or fa.tracked(...), on a rank that writes",
    )
