"""`fa.seeing.get_logger`: loggers of Python's `logging` for the main rank, all ranks, or in their order."""

from __future__ import annotations

import logging
from typing import Any

from fnaccel.collectives import gather_objects
from fnaccel.errors import ArgumentError, MissingBackendError, install_line
from fnaccel.world.environment import find_ranks
from fnaccel.world.world import current

_chosen: list[int] = []
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that knows its rank. Its methods are those of `logging.Logger`, with two more arguments.

    Each line begins with its rank, such as `[rank 1]`, if there are several.

    Args:
        all_ranks: write the line of each rank. By default the main rank writes its line, and no other rank
            does.
        in_order: the main rank writes the lines of all ranks, in the order of ranks. All ranks must make this
            call, with the same level: they exchange their lines.

    Example, on 2 ranks:
        >>> logger = fa.seeing.get_logger("train", level="info")
        >>> logger.info("rows of this rank: %d", 8 - world.rank, in_order=True)
    """

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name in logging
        """Whether a line of this level is written. A recipe's level is for loggers without their own."""
        chosen = get_level()
        if chosen is not None and self.logger.level == logging.NOTSET:
            self.logger.setLevel(chosen)
            _add_handler(rich=False)
        return super().isEnabledFor(level)

    def log(
        self,
        level: int,
        msg: object,
        *args: object,
        all_ranks: object = False,
        in_order: object = False,
        **kwargs: Any,
    ) -> None:
        """Write a line: see the class.

        Raises:
            NoWorldError: `in_order` on several ranks before `fa.start`.
            PeerLostError: `in_order`, and a rank left, exited or made another call.
        """
        if not self.isEnabledFor(level):
            return
        ranks = find_ranks()
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        if in_order and ranks.size > 1:
            text = _text(msg, args)
            lines: list[Any] = gather_objects(text, world=current())
            for rank, line in enumerate(lines) if ranks.rank == 0 else ():
                self.logger.log(level, "[rank %d] %s", rank, line, **kwargs)
        elif all_ranks or ranks.rank == 0:
            prefix = f"[rank {ranks.rank}] " if ranks.size > 1 else ""
            self.logger.log(level, f"{prefix}{msg}", *args, **kwargs)


def _text(msg: object, args: tuple[object, ...]) -> str:
    """The line as `logging` formats it. A wrong format is no reason for a rank to leave the exchange."""
    record = logging.LogRecord("", 0, "", 0, msg, args, None)
    try:
        return record.getMessage()
    except Exception as error:  # objects in the line may raise anything
        return f"{msg!s} {args!r}: {type(error).__name__}: {error}"


def get_logger(name: str | None = None, *, level: int | str | None = None, rich: bool = False) -> RankLogger:
    """A logger of Python's `logging` that writes on the main rank only, unless a call says otherwise.

    It works before `fa.start` too: the rank is that of the launcher then. If a level is known and no handler
    is configured, one that writes to standard error is added to the root logger, as `logging.basicConfig`
    does.

    Args:
        name: the name of the logger, such as `__name__`.
        level: the level, such as `"info"` or `logging.DEBUG`. By default the `tracking.level` of the recipe
            that `fa.config.recipe` returned, or the level that `logging` has for this name.
        rich: colours, and tracebacks with the values of variables, by the package rich. A handler that the
            script configured stays beside it.

    Raises:
        ArgumentError: no such level.
        MissingBackendError: `rich`, and the package is not installed.

    Example:
        >>> logger = fa.seeing.get_logger("train")
        >>> logger.warning("loss is %.2f", 0.5)
        >>> logger.warning("on each rank", all_ranks=True)
    """
    logger = logging.getLogger(name)
    if level is not None:
        try:
            logger.setLevel(as_level(level))
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"level={level!r} is no level",
                where="fa.seeing.get_logger",
                fix='level="debug", "info", "warning", "error", "critical", or a number',
            ) from error
    if rich or level is not None:
        _add_handler(rich=rich)
    return RankLogger(logger)


def _add_handler(*, rich: bool) -> None:
    """Add a handler to the root logger, if it has none, or if it has none of rich and that is asked for."""
    root = logging.getLogger()
    added: list[logging.Handler] = [each for each in root.handlers if hasattr(each, _MARK)]
    if rich:
        handler = _rich_handler()
        if any(type(each) is type(handler) for each in root.handlers):
            return
        for each in added:
            root.removeHandler(each)
    elif root.handlers:
        return
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
    setattr(handler, _MARK, True)
    root.addHandler(handler)


_MARK = "of_fnaccel"


def _rich_handler() -> logging.Handler:
    try:
        from rich.console import Console  # noqa: PLC0415 - optional
        from rich.logging import RichHandler  # noqa: PLC0415 - optional
    except ImportError as error:
        raise MissingBackendError(
            "the package rich is not installed",
            where="fa.seeing.get_logger(rich=True)",
            fix=f"{install_line('rich')}, or leave rich=True out",
        ) from error
    handler = RichHandler(
        console=Console(stderr=True), rich_tracebacks=True, tracebacks_show_locals=True, show_path=False
    )
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler


def as_level(level: int | str) -> int:
    """The number of a level, such as 20 for `"info"`.

    Raises:
        KeyError: no level has this name.
    """
    return logging.getLevelNamesMapping()[level.upper()] if isinstance(level, str) else level


def set_level(level: int | str | None) -> None:
    """Set the level of loggers that have none of their own, as a recipe does. None takes it back."""
    _chosen[:] = [] if level is None else [as_level(level)]


def get_level() -> int | None:
    """The level that a recipe has set, or None."""
    return _chosen[0] if _chosen else None
