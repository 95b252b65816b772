"""Checks of paths that a user gives: no address of a store, and no device in the place of a file."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator
from pathlib import Path

from fnaccel.errors import ArgumentError, require

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # pathlib makes s3:/ of s3://, and C:/ is a drive


def local_path(path: object, where: str) -> Path:
    """Return a path of this machine.

    Raises:
        ArgumentError: it is no path, is empty, or has a scheme, such as `s3://`. As a path, `s3:` would be a
            folder of this machine, which is lost with a rented machine.
    """
    address = _ADDRESS.match(str(path)) if isinstance(path, str | os.PathLike) else None
    if address is not None:
        scheme, rest = address[1].lower(), str(path)[address.end() :].lstrip("/")
        raise ArgumentError(
            f"'{scheme}://{rest}' is an address, and a path of this machine is needed",
            where=where,
            fix="leave file:// out"
            if scheme == "file"
            else f"give a folder where the {scheme} store is mounted, or copy the files to it after the save "
            "(or from it before they are read)",
        )
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    plain = isinstance(text, str) and text and "\0" not in text
    require(bool(plain), f"{path!r} is no path", where, 'a path, such as "runs/a"')
    return Path(text)


def optional_path(path: object, where: str) -> Path | None:
    """Return a path of this machine, or None for None. See `local_path`."""
    return None if path is None else local_path(path, where)


def output_file(path: object, where: str) -> Path:
    """Return where a new file is written: the target of links. A regular file may be replaced.

    Raises:
        ArgumentError: as `local_path`, or something is there that is no regular file (a folder, a device, a
            pipe), or links lead to nowhere.
    """
    given = local_path(path, where)
    place = Path(os.path.realpath(given))
    what = "a folder" if place.is_dir() else "no regular file, but a device, a pipe or a socket"
    if place.is_symlink():
        what = "a link that leads to itself"
    require(
        place.is_file() or not os.path.lexists(place), f"{given} is {what}", where,
        'a file, such as "runs/report.html"',
    )  # fmt: skip
    return place


@contextlib.contextmanager
def named_errors(path: Path) -> Generator[None]:
    """Give the system's errors in the body the path, if they name no file: those of a descriptor do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def replace_file(path: object, text: str, where: str) -> None:
    """Write a text file as a whole: no reader sees half of it, and its folder is made.

    Raises:
        ArgumentError: as `output_file`, or the file can't be written.
    """
    place = output_file(path, where)
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(place)
    except OSError as error:
        raise ArgumentError(
            f"{path} can't be written: {error.strerror or error} ({error.filename or place})",
            where=where,
            fix="give a file in a folder that can be written, on a disk with free space",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def require_page(path: object, where: str) -> None:
    """Raise ArgumentError for a path where no page can be, see `output_file`, and for the path of a log."""
    name = str(output_file(path, where))
    require(
        not name.endswith(".jsonl"),
        f"{path} is the name of a log, which the page would replace",
        where,
        'a path with another ending, such as "runs/report.html"',
    )
