"""A directory or file that is filled beside its place and renamed into it when all of it is on the device."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from fnaccel.checkpoint.disk import durable
from fnaccel.errors import CheckpointError
from fnaccel.world.paths import local_path

_WEIGHTS = re.compile(r"(model.*\.safetensors|pytorch_model.*\.bin)(\.index\.json)?")  # of an export


def check_free(target: Path, *, overwrite: bool, where: str, file: bool = False) -> Path:
    """Resolve links, and check that the target can be written or replaced.

    Args:
        target: the path of the new directory or file.
        overwrite: whether an existing directory or file may be replaced.
        where: the public function, for messages.
        file: whether the target is a file.

    Raises:
        CheckpointError: something is there, or it is neither a file nor a directory as asked for.
        ArgumentError: it is no path of this machine: see `local_path`.
    """
    place = Path(os.path.realpath(local_path(target, where)))
    if place.is_symlink():
        raise CheckpointError(f"{target} is a link that leads nowhere", where=where, fix="remove the link")
    if not place.exists():
        return place
    if file:
        _check_file(place, target, overwrite=overwrite, where=where)
    else:
        _check_directory(place, target, overwrite=overwrite, where=where)
    return place


def _check_file(place: Path, target: Path, *, overwrite: bool, where: str) -> None:
    if not place.is_file():
        what = "a directory" if place.is_dir() else "neither a file nor a directory"
        raise CheckpointError(
            f"{target} is {what}, and a file is to be written", where=where, fix="give the path of a file"
        )
    if not overwrite:
        raise CheckpointError(
            f"{target} exists", where=where, fix="give a new file, or overwrite=True (--overwrite)"
        )


def _check_directory(place: Path, target: Path, *, overwrite: bool, where: str) -> None:
    if not place.is_dir():
        what = "a file" if place.is_file() else "neither a file nor a directory"
        raise CheckpointError(
            f"{target} is {what}, and a directory is to be written", where=where, fix="give a new directory"
        )
    if Path.cwd().is_relative_to(place):
        raise CheckpointError(
            f"this process runs in {place}, so that directory can't be replaced as a whole",
            where=where,
            fix="give a new directory, such as ./exported",
        )
    if os.path.ismount(place):
        raise CheckpointError(
            f"{place} is a mount point, so it can't be replaced as a whole",
            where=where,
            fix=f"give a directory in it, such as {place / 'exported'}",
        )
    entries = list(place.iterdir())
    if entries and not overwrite:
        raise CheckpointError(
            f"{target} exists and is not empty",
            where=where,
            fix="give a new directory, or overwrite=True (--overwrite)",
        )
    strange = sorted(entry.name for entry in entries if not entry.is_file())
    if strange:
        names = ", ".join(strange[:5])
        raise CheckpointError(
            f"{target} holds directories, or other things than files, and stays as it is: {names}",
            where=where,
            fix="give another directory, or remove that one yourself",
        )


def stage(target: Path) -> Path:
    """A new, empty directory beside the target."""
    durable.make_directory(target.parent, parents=True)
    directory = durable.hidden(target.parent, f"{target.name}.writing")
    durable.make_directory(directory)
    return directory


def commit(staged: Path, target: Path) -> None:
    """Make a filled directory the target. Files of an old target that the new one lacks are kept.

    Weights are never kept: files of an earlier export would be read as part of this one.
    """
    for file in target.iterdir() if target.is_dir() else ():
        if not (staged / file.name).exists() and not _WEIGHTS.fullmatch(file.name):
            shutil.copy2(file, staged / file.name)
    aside = durable.hidden(target.parent, f"{target.name}.old")
    durable.put_in_place(staged, target, aside)
    discard(aside)


def commit_file(staged: Path, target: Path) -> None:
    """Make a written file the target, over one that is there."""
    staged.replace(target)
    durable.sync_directory(target.parent)


def discard(directory: Path) -> None:
    """Remove a directory that is unfinished, or was replaced."""
    with contextlib.suppress(OSError):  # it is in nobody's way
        durable.remove(directory)
