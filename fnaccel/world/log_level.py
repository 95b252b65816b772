"""The level of log lines of this process, which a recipe sets and `fa.seeing.get_logger` reads."""

from __future__ import annotations

import logging

_chosen: list[int] = []


def as_level(level: int | str) -> int:
    """The number of a level, such as 20 for `"info"`.

    Raises:
        KeyError: no level has this name.
    """
    return logging.getLevelNamesMapping()[level.upper()] if isinstance(level, str) else level


def set_level(level: int | str | None) -> None:
    """Set the level of loggers that have none of their own. None takes it back."""
    _chosen[:] = [] if level is None else [as_level(level)]


def get_level() -> int | None:
    """The level that a recipe has set, or None."""
    return _chosen[0] if _chosen else None
