"""A directory or file that is filled beside its place and renamed into it when all of it is on the device."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from pathlib import Path

from fnaccel.checkpoint import durable
from fnaccel.errors import CheckpointError


def check_free(target: Path, *, overwrite: bool, where: str) -> None:
    """Raise CheckpointError where something is at the target that must not be replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(
            f"{target} exists" + (" and is not empty" if target.is_dir() else ""),
            where=where,
            fix="give a new directory, or overwrite=True (--overwrite)",
        )
    strange = [one.name for one in target.iterdir() if one.is_dir()] if target.is_dir() else []
    if strange:
        raise CheckpointError(
            f"{target} holds directories ({', '.join(sorted(strange)[:5])}), so it is not replaced",
            where=where,
            fix="give another directory, or remove that one yourself",
        )


def stage(target: Path) -> Path:
    """A new, empty directory beside the target."""
    durable.make_directory(target.parent, parents=True)
    made = target.parent / f".{target.name}.writing-{uuid.uuid4().hex[:12]}"
    durable.make_directory(made)
    return made


def commit(staged: Path, target: Path) -> None:
    """Make a filled directory the target; what was there keeps the files that the new one does not have.

    Weights are never kept: files of an earlier export would be read as part of this one.
    """
    aside: Path | None = None
    if target.is_dir() and any(target.iterdir()):
        for file in target.iterdir():
            if not (staged / file.name).exists() and not _is_weights(file.name):
                shutil.copy2(file, staged / file.name)
        aside = target.parent / f".{target.name}.old-{uuid.uuid4().hex[:12]}"
        durable.sync_directory(staged)
        durable.rename(target, aside)
    else:
        durable.sync_directory(staged)
    try:
        durable.rename(staged, target)
    except OSError:
        if aside is not None:
            durable.rename(aside, target)
        raise
    durable.sync_directory(target.parent)
    if aside is not None:
        with contextlib.suppress(OSError):  # it is in nobody's way
            durable.remove(aside)


def commit_file(staged: Path, target: Path) -> None:
    """Make a written file the target, over one that is there."""
    staged.replace(target)
    durable.sync_directory(target.parent)


def discard(staged: Path) -> None:
    """Remove what was not finished."""
    with contextlib.suppress(OSError):
        durable.remove(staged)


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".index.json", ".bin", ".h5", ".msgpack", ".pt", ".pth"))
