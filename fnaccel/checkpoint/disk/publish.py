"""Which checkpoints exist, and how a checkpoint is committed: filled in a hidden directory, then renamed.

    root/step-0000000010          committed
    root/step-0000000010.old      committed: step 10 before a second save of step 10 replaces it
    root/.saving-step-…           a save that is under way, or that a crash left. No reader opens it
    root/.removing-step-…         a checkpoint that is being removed, or that a reader still holds

A process that fills or reads a directory holds a lock on it, which the system drops with the process. If
nobody holds a hidden directory, the next save that succeeds removes it. If the file system has no locks, the
next save does so after a day without changes. Ranks are not known here.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Generator
from pathlib import Path

import attrs

from fnaccel.checkpoint.disk import durable, locking
from fnaccel.checkpoint.format import manifest
from fnaccel.checkpoint.format.manifest import OWN_NAME, Manifest
from fnaccel.errors import CheckpointError
from fnaccel.step.html_table import table
from fnaccel.texts import size_of
from fnaccel.world.paths import local_path

_COMMITTED = re.compile(r"step-(\d{10,19})(\.old)?")
_UNFINISHED = "saving-"
_REMOVED = "removing-"
_HIDDEN = re.compile(r"\.(saving|removing)-step-\d{10,19}(\.old)?-[0-9a-f]{12}")
_OLD = ".old"
_FORGOTTEN = 24 * 3600.0  # seconds
_LISTINGS = 20


@attrs.frozen
class Checkpoint:
    """A committed checkpoint: its step and its directory."""

    step: int
    path: Path

    def _repr_html_(self) -> str:
        rows = [(file.name, size_of(file.stat().st_size)) for file in sorted(self.path.glob("*"))]
        return table(f"checkpoint of step {self.step} in {self.path}", rows)


def checkpoints(directory: str | os.PathLike[str]) -> list[Checkpoint]:
    """The committed checkpoints under a root, oldest step first.

    Args:
        directory: the root that `fa.save` was given. It need not exist.

    Raises:
        OSError: the root can't be listed.

    Example:
        >>> for step in (1, 2):
        ...     path = fa.save("runs/gpt", state, step=step)
        >>> [checkpoint.step for checkpoint in fa.checkpoint.checkpoints("runs/gpt")]
        [1, 2]
    """
    root = local_path(directory, "fa.checkpoint.checkpoints").absolute()  # as fa.save returns it
    listing = _listed(root)
    # A directory that is renamed while the names are read may be missed under both of its names.
    for _ in range(_LISTINGS):
        previous, listing = listing, _listed(root)
        if listing == previous:
            break
    return [Checkpoint(step, path) for step, (path, _) in sorted(listing.items())]


def _listed(root: Path) -> dict[int, tuple[Path, int]]:
    """The committed checkpoints by step: path and inode."""
    listing: dict[int, tuple[Path, int]] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(root) as entries:
        # sorted, so that step-N.old comes after step-N, which hides it
        for entry in sorted(entries, key=lambda entry: entry.name):
            matched = _COMMITTED.fullmatch(entry.name)
            path = root / entry.name
            if matched and (path / manifest.FILE).is_file():
                listing.setdefault(int(matched[1]), (path, entry.inode()))
    return listing


def committed(path: Path) -> Path | None:
    """The directory of the checkpoint that a path names, while a writer may be replacing it.

    Args:
        path: one checkpoint: `root/step-0000000010`, or a directory with another name.

    Returns:
        The path, or the same checkpoint under its other name (`.old`). None if there is no checkpoint.
    """
    paths = [path]
    if _COMMITTED.fullmatch(path.name):
        new = path.with_name(path.name.removesuffix(_OLD))
        # a second time, since a writer may have put the new one there in between
        paths = [new, new.with_name(new.name + _OLD)] * 3
    return next((place for place in paths if (place / manifest.FILE).is_file()), None)


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The committed checkpoint of the highest step under a root. None if there is none.

    Args:
        directory: the root that `fa.save` was given. It need not exist.

    Raises:
        OSError: the root can't be listed.

    Example:
        >>> fa.checkpoint.latest("runs/gpt") is None
        True
        >>> path = fa.save("runs/gpt", state)
        >>> fa.checkpoint.latest("runs/gpt").name
        'step-0000000000'
    """
    committed_steps = checkpoints(directory)
    return committed_steps[-1].path if committed_steps else None


def name_of(step: int) -> str:
    """The name of the checkpoint of one step."""
    return f"step-{step:010d}"


def stage(root: Path, step: int) -> Path:
    """A new directory in which the checkpoint of one step can be filled."""
    if not root.exists():
        durable.make_directory(root, parents=True)
        durable.sync_directory(root.parent)
    directory = durable.hidden(root, f"{_UNFINISHED}{name_of(step)}")
    durable.make_directory(directory)
    return directory


def commit(staged: Path, root: Path, described: Manifest, where: str) -> Path:
    """Add the manifest to a filled directory, make it the checkpoint of its step, and return its path.

    A checkpoint of that step is replaced: at any moment one of the two can be read.

    Raises:
        CheckpointError: its name belongs to a file or a directory that no save wrote.
    """
    check_free(root, described.step, where)
    final, aside = _names(root, described.step)
    text = manifest.dump(described)
    manifest.parse(text, where)  # one that a reader would refuse is not committed
    durable.write_file(staged / manifest.FILE, [memoryview(text)])
    if final.exists() and aside.exists():
        discard(aside)
    durable.put_in_place(staged, final, aside)
    return final


def check_free(root: Path, step: int, where: str) -> None:
    """Check that the names of a checkpoint are free, or those of a checkpoint that may be replaced.

    Raises:
        CheckpointError: a file, or a directory with other files than those of a save, has such a name.
    """
    for path in _names(root, step):
        strange = None if (path / manifest.FILE).is_file() else _strange(path)
        if strange is not None:
            raise CheckpointError(
                f"{path} is no checkpoint: it has no {manifest.FILE}, and holds {strange}",
                where=where,
                fix="move it away, or save into another directory. Nothing was changed",
            )


def _names(root: Path, step: int) -> tuple[Path, Path]:
    final = root / name_of(step)
    return final, final.with_name(final.name + _OLD)


def _strange(path: Path) -> str | None:
    """The name of a file that no save wrote, for messages. None if all at the path may be replaced."""
    if not os.path.lexists(path):
        return None
    if not path.is_dir():
        return "no files, since it is a file"
    # the files of a damaged checkpoint may be replaced
    return next((entry.name for entry in sorted(path.iterdir()) if not OWN_NAME.fullmatch(entry.name)), None)


def taken_names(staged: Path) -> list[str]:
    """The names in a directory to fill that only the save may give, or the directory's own if it is gone."""
    if not staged.is_dir():
        return [staged.name]
    names = sorted(path.name for path in staged.iterdir())
    return [name for name in names if name == manifest.FILE or OWN_NAME.fullmatch(name)]


def sweep(root: Path) -> None:
    """Remove replaced checkpoints, and leftovers of interrupted saves."""
    with contextlib.suppress(OSError):  # the next save tries again
        for path in sorted(root.iterdir()):
            matched = _COMMITTED.fullmatch(path.name)
            if matched and matched[2]:
                new = path.with_name(path.name.removesuffix(_OLD))
                ours = (path / manifest.FILE).is_file() or _strange(path) is None
                if ours and (new / manifest.FILE).is_file():
                    discard(path)
            elif _HIDDEN.fullmatch(path.name):
                with locking.locked(path, shared=False) as free:
                    if free or (free is None and _is_forgotten(path)):
                        durable.remove(path)


def check_alone(staged: Path, where: str) -> None:
    """See that nobody else fills a directory beside `staged`.

    Raises:
        CheckpointError: another process holds one.
    """
    for path in staged.parent.glob(f".{_UNFINISHED}*"):
        if path == staged:
            continue
        with contextlib.suppress(FileNotFoundError), locking.locked(path, shared=False) as free:
            if free is False:
                raise CheckpointError(
                    f"another process is saving into {staged.parent}: it holds {path.name}",
                    where=where,
                    fix="give each job a directory of its own, or let the other one end first",
                )


def discard(path: Path, *, unless_read: bool = False) -> None:
    """Remove a committed checkpoint. At no moment does half of it look committed.

    If a reader holds it, its files stay until a later save. With `unless_read` its name stays, too.
    """
    # the lock stays until all is removed: a reader that comes in between waits, and begins again
    with locking.locked(path, shared=False) as free:
        if free is False and unless_read:
            return
        hidden = durable.hidden(path.parent, f"{_REMOVED}{path.name}")
        durable.rename(path, hidden)
        if free is not False:
            durable.remove(hidden)


@contextlib.contextmanager
def held(directory: Path) -> Generator[None]:
    """Mark a directory as being filled or read, while the body runs and its process lives."""
    with locking.locked(directory, shared=True):
        yield


def _is_forgotten(path: Path) -> bool:
    with contextlib.suppress(OSError):
        newest = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
        return time.time() - newest > _FORGOTTEN
    return False
