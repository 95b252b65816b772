"""The base of trackers over another library: a lazy import, a run object, and the ranks that write."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fnaccel.errors import ArgumentError, MissingBackendError, install_line, nearest
from fnaccel.track.plain import number_of
from fnaccel.track.tracker import Ranks

_logger = logging.getLogger("fnaccel")
_GIVEN = {
    *("self", "step", "global_step", "iteration", "name", "title", "series", "run_id"),
    *("data", "dic", "metrics", "summary", "val", "value"),
}
"""Parameters of the libraries' functions that a tracker fills itself."""


class LeftOut:
    """Logs a warning for each metric that is not written. Each name is logged once."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._names: set[str] = set()

    def warn(self, name: str, why: str) -> None:
        """Log that a metric is left out, and the reason."""
        if name not in self._names:
            self._names.add(name)
            _logger.warning(
                "%s leaves out the metric %r: %s. Numbers, tensors of one element and text are written",
                self._owner, name, why,
            )  # fmt: skip


class LibraryTracker:
    """The common part of these trackers. A subclass sets `_run` in `start`, and clears it in `finish`.

    Attributes:
        ranks: the ranks that write: `"main"`, `"all"`, or one by its number.
    """

    def __init__(self, ranks: Ranks = "main") -> None:
        self.ranks: Ranks = ranks
        self._rank: int | None = None
        self._run: Any = None
        self._left_out = LeftOut(type(self).__name__)

    @property
    def native(self) -> Any:
        """The run object of the library, or None if the tracker has not started on this rank."""
        return self._run

    def use_rank(self, rank: int) -> None:
        """Add the rank to the name of the run."""
        self._rank = rank

    def log_options(self) -> set[str]:
        """The options that `log` takes for one call: further arguments of the library's function.

        Raises:
            ArgumentError: before `start`, or after `finish`.
        """
        self._started("log_options")
        return own_options(self._writer()) - _GIVEN

    def add_config(self: Any, config: Mapping[str, Any]) -> None:
        """Show further entries of the config after `start`, as text."""
        self.log(0, {name: str(value) for name, value in config.items()})

    def _writer(self) -> Callable[..., Any]:
        """The function of the library that writes numbers."""
        return self._run.log

    def _numbers_and_texts(self, metrics: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
        """The metrics that are numbers, and those that are text. Others are named in a warning."""
        numbers: dict[str, float] = {}
        texts: dict[str, str] = {}
        for name, value in metrics.items():
            number = None if isinstance(value, str) else number_of(value)
            if isinstance(value, str):
                texts[name] = value
            elif number is not None:
                numbers[name] = number
            else:
                self._left_out.warn(name, f"{type(value).__name__} is no number and no text")
        return numbers, texts

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


def unknown_option(tracker: str, name: str, known: Iterable[str], where: str = "trackers") -> ArgumentError:
    """The error of an option that a tracker does not have."""
    return ArgumentError(f"{tracker} has no option {name!r}", where=where, fix=nearest(name, known))


def check_log_options(tracker: Any, options: Mapping[str, Any]) -> None:
    """Check that the method `log` of a tracker takes these options for one call.

    Raises:
        ArgumentError: it has no such parameter. The known options are listed.
    """
    if not options:
        return
    name = type(tracker).__name__
    if isinstance(tracker, LibraryTracker):
        known = tracker.log_options()
    else:
        try:
            _, _, *further = inspect.signature(tracker.log).parameters.values()
        except ValueError:  # a method of a compiled module may have no signature
            return
        if any(each.kind is each.VAR_KEYWORD for each in further):
            return
        known = {each.name for each in further if each.kind is not each.VAR_POSITIONAL}
    for option in options:
        if option not in known and not known:
            raise ArgumentError(
                f"{name}.log takes no options of one call, such as {option!r}",
                where="run.log of fa.tracked, options=",
                fix=f"leave it out, or in a class of yours: def log(self, step, metrics, {option}=None)",
            )
        if option not in known:
            raise unknown_option(f"{name}.log", option, known, "run.log of fa.tracked, options=")


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
        fix="use it inside fa.scan(track=...) or fa.tracked(...), on a rank that writes",
    )
