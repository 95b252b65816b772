"""Checks of paths that a user gives, before training begins."""

from __future__ import annotations

import os
from pathlib import Path

from fnaccel.errors import require


def require_path(path: object, where: str) -> None:
    """Raise ArgumentError for anything but a path that is not empty."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    require(bool(text), f"{path!r} is no path", where, 'a path, such as "runs/a"')


def require_page(path: object, where: str) -> None:
    """Raise ArgumentError for a path where no page can be: a folder, or a log that the page would replace."""
    require_path(path, where)
    name = str(path)
    require(
        not name.endswith(".jsonl"),
        f"{name} is the name of a log, which the page would replace",
        where,
        'a path with another ending, such as "runs/report.html"',
    )
    require(not Path(name).is_dir(), f"{name} is a folder", where, 'a file, such as "runs/report.html"')
