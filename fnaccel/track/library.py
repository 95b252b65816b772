"""The bases of trackers over another library: `LibraryTracker`, and `ValueTracker` for one method of a run.

A tracker's own file has what its library does differently: names, options, and how a run begins.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from fnaccel.errors import ArgumentError, MissingBackendError, install_line, nearest
from fnaccel.track.media import as_picture, as_pictures
from fnaccel.track.plain import number_of
from fnaccel.track.tracker import Ranks
from fnaccel.world.paths import optional_path

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
    """The common part of these trackers. A subclass sets the names below, and has `_begin` and `_write`.

    Attributes:
        ranks: the ranks that write: `"main"`, `"all"`, or one by its number.
        options: further arguments of the function of the library that begins a run.
    """

    _module: ClassVar[str]
    """The module of the library."""
    _extra: ClassVar[str | None] = None
    """The extra of fnaccel that installs the library, if it is not called as the module."""
    _starters: ClassVar[tuple[str, ...]] = ("init",)
    """The functions of the module that take `options`."""
    _writer: ClassVar[str] = "log"
    """The method of the run that writes numbers. Its further arguments are options of `log`."""
    _closer: ClassVar[str] = "finish"
    """The method of the run that ends it."""
    _online_option: ClassVar[tuple[str, Any, Any] | None] = None
    """An option of the library, and its values for `offline=False` and `offline=True`."""
    _server_options: ClassVar[tuple[str, ...]] = ()
    """Further options that `offline=True` contradicts, since they ask for a server."""
    _is_absolute: ClassVar[bool] = False
    """Whether `directory` stays the same folder if the working directory changes before `start`."""

    def __init__(
        self,
        *,
        project: str | None = None,
        run_name: str | None = None,
        directory: str | Path | None = None,
        ranks: Ranks = "main",
        offline: bool | None = None,
        **options: Any,
    ) -> None:
        owner = type(self).__name__
        self.ranks: Ranks = ranks
        self.options = options
        self._project, self._name = project, run_name
        self._directory: Path | None = self._folder(directory)
        self._offline = offline
        asks = self._servers()
        if self._online_option is not None:
            name, online, without_network = self._online_option
            asks[name] = options.setdefault(name, None)
            if offline is not None:
                options[name] = without_network if offline else online
        check_offline(owner, offline, asks)
        self._rank: int | None = None
        self._library: Any = None
        self._run: Any = None
        self._began = False
        self._left_out = LeftOut(owner)

    @property
    def native(self) -> Any:
        """The run object of the library, or None if the tracker has not started on this rank."""
        return self._run

    def use_rank(self, rank: int) -> None:
        """Add the rank to the name of the run."""
        self._rank = rank

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin the run, or join the run that the script began. `config` is shown beside it.

        Raises:
            MissingBackendError: the library is not installed.
            ArgumentError: an option that the library does not take.
            OSError: a file can't be written.
        """
        self._library = self._load()
        self._check_options(*(attrgetter(name)(self._library) for name in self._starters))
        current = self._current()
        self._began = current is None
        self._run = self._begin(config) if current is None else current
        if current is not None:
            self._join(config)

    def add_config(self: Any, config: Mapping[str, Any]) -> None:
        """Show further entries of the config after `start`, as text."""
        self.log(0, {name: str(value) for name, value in config.items()})

    def log_options(self) -> set[str]:
        """The options that `log` takes for one call: further arguments of the library's function.

        Raises:
            ArgumentError: before `start`, or after `finish`.
        """
        self._started("log_options")
        return own_options(self._write_function()) - _GIVEN

    def log(self, step: int, metrics: Mapping[str, Any], **options: Any) -> None:
        """Write one step's metrics.

        Args:
            step: the step.
            metrics: numbers and text.
            options: further arguments of the library's function. See `log_options`.

        Raises:
            ArgumentError: before `start`, or after `finish`.
        """
        self._started("log")
        self._write(step, metrics, options)

    def finish(self) -> None:
        """End the run if `start` began it. All metrics are sent, or on disk, when this returns."""
        run, self._run = self._run, None
        if run is not None and self._began:
            self._close(run)

    def _begin(self, config: Mapping[str, Any]) -> Any:
        """Begin a run of the library that shows the config, and return it."""
        raise NotImplementedError

    def _write(self, step: int, metrics: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Write one step's metrics to the run."""
        raise NotImplementedError

    def _current(self) -> Any:
        """The run that the script began, or None."""
        return None

    def _join(self, config: Mapping[str, Any]) -> None:
        """Show the config beside the run that the script began."""

    def _close(self, run: Any) -> None:
        """End a run that `_begin` began."""
        getattr(run, self._closer)()

    def _write_function(self) -> Callable[..., Any]:
        """The function of the library that writes numbers."""
        return attrgetter(self._writer)(self._run)

    def _folder(self, directory: Any) -> Path | None:
        """The path of the argument `directory`."""
        folder = optional_path(directory, type(self).__name__)
        return folder.absolute() if folder is not None and self._is_absolute else folder

    def _servers(self) -> dict[str, Any]:
        """The arguments that ask for a server, by name. An argument that does not is empty."""
        return {name: self.options.get(name) for name in self._server_options}

    def _options_with_folder(self, name: str) -> dict[str, Any]:
        """The options, in which `name` is the argument `directory`, if it was given. Its folder is made."""
        options = dict(self.options)
        if self._directory is not None:
            options[name] = str(self._directory)
        if name in options:
            Path(options[name]).mkdir(parents=True, exist_ok=True)
        return options

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

    def _check_options(self, *functions: Callable[..., Any]) -> None:
        """Check that the functions of the library take the options of the user.

        Raises:
            ArgumentError: none of them has a parameter of that name. The known options are listed.
        """
        known = own_options(type(self)).union(*map(own_options, functions))
        check_known(type(self).__name__, self.options, known)

    def _started(self, method: str) -> Any:
        """The run object.

        Raises:
            ArgumentError: before `start`, after `finish`, or on a rank that does not write.
        """
        if self._run is None:
            raise not_started(f"{type(self).__name__}.{method}")
        return self._run

    def _load(self) -> Any:
        """Import the library.

        Raises:
            MissingBackendError: it is not installed.
        """
        try:
            return importlib.import_module(self._module)
        except ImportError as error:
            raise MissingBackendError(
                f"{self._module} could not be imported: {error}",
                where=f"{type(self).__name__}.start",
                fix=install_line(self._extra or self._module),
            ) from error


class ValueTracker(LibraryTracker):
    """The base over a library whose runs take numbers, texts, images and tables by one method.

    The library has a class `Image`, and a class `Table` if `log_table` is the one here.
    """

    def log_images(self, step: int, name: str, images: object) -> None:
        """Show images. See `Media`."""
        self._started("log_images")
        self._put(step, {name: [self._library.Image(picture) for picture in as_pictures(images)]})

    def log_figure(self, step: int, name: str, figure: object) -> None:
        """Show a figure of matplotlib as an image."""
        self._started("log_figure")
        self._put(step, {name: self._library.Image(as_picture(figure))})

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table."""
        self._started("log_table")
        table = self._library.Table(columns=list(columns), data=[list(row) for row in rows])
        self._put(step, {name: table})

    def _write(self, step: int, metrics: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        numbers, texts = self._numbers_and_texts(metrics)
        shown = {name: self._text(text) for name, text in texts.items()}
        self._put(step, {**numbers, **shown}, **options)

    def _put(self, step: int, values: dict[str, Any], **options: Any) -> None:
        """Write numbers and objects of the library to the run."""
        self._run.log(values, step=step, **options)

    def _text(self, text: str) -> Any:
        """The object of the library for a text."""
        return self._library.Text(text)


def own_options(function: Callable[..., Any]) -> set[str]:
    """The names of the parameters of a class or function, without `**options`."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}


def all_options(function: Callable[..., Any]) -> set[str] | None:
    """The names of the parameters, or None if the function has `**options`, or no signature that is known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function of a compiled module may have no signature
        return None
    return None if any(each.kind is each.VAR_KEYWORD for each in parameters) else own_options(function)


def check_known(owner: str, options: Iterable[str], known: Iterable[str], where: str = "trackers") -> None:
    """Check that a tracker has these options.

    Raises:
        ArgumentError: it does not have one of them. The known options are listed, or the nearest is named.
    """
    for name in options:
        if name not in known:
            raise ArgumentError(f"{owner} has no option {name!r}", where=where, fix=nearest(name, known))


def check_log_options(tracker: Any, options: Mapping[str, Any]) -> None:
    """Check that the method `log` of a tracker takes these options for one call.

    Raises:
        ArgumentError: it has no such parameter. The known options are listed.
    """
    if not options:
        return
    owner, where = f"{type(tracker).__name__}.log", "run.log of fa.tracked, options="
    if isinstance(tracker, LibraryTracker):
        known = tracker.log_options()
    else:
        known = all_options(tracker.log)
        if known is None:
            return
        known -= {*list(inspect.signature(tracker.log).parameters)[:2]}  # step and metrics
    if not known:
        option = next(iter(options))
        raise ArgumentError(
            f"{owner} takes no options of one call, such as {option!r}",
            where=where,
            fix=f"leave it out, or in a class of yours: def log(self, step, metrics, {option}=None)",
        )
    check_known(owner, options, known, where)


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
