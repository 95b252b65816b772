"""Which checkpoints exist, and how one begins to: a directory that is filled beside them, then renamed.

    root/step-0000000010          committed
    root/step-0000000010.old      committed: what a second save of step 10 replaces, until it has
    root/.saving-step-…           being written, or what a crash left; nobody reads it

Whoever fills or reads a directory holds a lock on it, which the system drops with the process. So what nobody
holds is a leftover, and the next save that succeeds removes it; where the file system has no locks, after
a day without changes. Ranks are not known here.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import uuid
from collections.abc import Generator
from pathlib import Path

import attrs

from fnaccel.checkpoint import durable, manifest
from fnaccel.errors import CheckpointError

_COMMITTED = re.compile(r"step-(\d{10,19})(\.old)?")
_UNFINISHED = ".saving-"
_FORGOTTEN = 24 * 3600.0  # seconds


@attrs.frozen
class Checkpoint:
    """A committed checkpoint: of which step, and where."""

    step: int
    path: Path


def checkpoints(directory: str | os.PathLike[str]) -> list[Checkpoint]:
    """The committed checkpoints under a root, oldest step first.

    Args:
        directory: the root that `fa.save` was given; it need not exist.

    Raises:
        OSError: the root can't be listed.

    Example: `[one.step for one in fa.checkpoints("runs/gpt")]`.
    """
    found: dict[int, Path] = {}
    with contextlib.suppress(FileNotFoundError):
        # sorted, so that step-N.old comes after step-N, which hides it
        for path in sorted(Path(directory).iterdir()):
            matched = _COMMITTED.fullmatch(path.name)
            if matched and (path / manifest.FILE).is_file():
                found.setdefault(int(matched[1]), path)
    return [Checkpoint(step, path) for step, path in sorted(found.items())]


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The committed checkpoint of the highest step under a root; None where there is none.

    Args:
        directory: the root that `fa.save` was given; it need not exist.

    Raises:
        OSError: the root can't be listed.

    Example: `state = fa.restore("runs/gpt", like=state) if fa.latest("runs/gpt") else state`.
    """
    found = checkpoints(directory)
    return found[-1].path if found else None


def name_of(step: int) -> str:
    """The name of the checkpoint of one step."""
    return f"step-{step:010d}"


def stage(root: Path, step: int) -> Path:
    """A new directory in which the checkpoint of one step can be filled."""
    if not root.exists():
        durable.make_directory(root, parents=True)
        durable.sync_directory(root.parent)
    made = root / f"{_UNFINISHED}{name_of(step)}-{uuid.uuid4().hex[:12]}"
    durable.make_directory(made)
    return made


def commit(staged: Path, root: Path, step: int) -> Path:
    """Make a filled directory the checkpoint of its step, atomically; its path.

    One that exists is replaced: whatever happens in between, one of the two is found.
    """
    final = root / name_of(step)
    aside = root / f"{final.name}.old"
    durable.sync_directory(staged)
    if final.exists():
        if aside.exists():
            discard(aside)
        durable.rename(final, aside)
    durable.rename(staged, final)
    durable.sync_directory(root)
    return final


def sweep(root: Path) -> None:
    """Remove what others have replaced, and leftovers of saves that nobody finishes."""
    with contextlib.suppress(OSError):  # what can't be removed now is tried again by the next save
        for aside in root.glob("step-*.old"):
            if (aside.with_suffix("") / manifest.FILE).is_file():
                discard(aside)
        for path in root.glob(f"{_UNFINISHED}*"):
            if _forgotten(path):
                durable.remove(path)


def check_alone(staged: Path, where: str) -> None:
    """See that nobody else fills a directory beside `staged`.

    Raises:
        CheckpointError: another process holds one.
    """
    for path in staged.parent.glob(f"{_UNFINISHED}*"):
        if path == staged:
            continue
        with contextlib.suppress(FileNotFoundError), _locked(path, wait=False) as free:
            if free is False:
                raise CheckpointError(
                    f"another process is saving into {staged.parent}: it holds {path.name}",
                    where=where,
                    fix="give each job a directory of its own, or let the other one end first",
                )


def discard(path: Path, *, unless_read: bool = False) -> None:
    """Remove a committed checkpoint; at no moment does half of it look committed.

    With `unless_read`, one that someone holds stays.
    """
    if unless_read:
        with _locked(path, wait=False) as free:
            if free is False:
                return
    hidden = path.with_name(f"{_UNFINISHED}{path.name}-{uuid.uuid4().hex[:12]}")
    durable.rename(path, hidden)
    durable.remove(hidden)


@contextlib.contextmanager
def held(staged: Path) -> Generator[None]:
    """Mark a directory as being filled or read, while the body runs and its process lives."""
    with _locked(staged, wait=True):
        yield


def _forgotten(path: Path) -> bool:
    with _locked(path, wait=False) as free:
        if free is not None:
            return free
    with contextlib.suppress(OSError):
        newest = max(one.stat().st_mtime for one in (path, *path.iterdir()))
        return time.time() - newest > _FORGOTTEN
    return False


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Generator[bool | None]:
    """Lock a directory; whether it could be, None where the system can't tell."""
    if sys.platform == "win32":
        yield None
        return
    import fcntl  # noqa: PLC0415 - not on every system

    file = os.open(path, os.O_RDONLY)
    _locks.add(file)
    try:
        try:
            # shared for the holder: network file systems give no more to what is open for reading
            fcntl.flock(file, fcntl.LOCK_SH if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            free: bool | None = True
        except BlockingIOError:
            free = False
        except OSError:
            free = None
        yield free
    finally:
        _locks.discard(file)
        os.close(file)


_locks: set[int] = set()


def _forget_locks() -> None:
    """In a child that is forked: its copies would hold the locks for as long as it lives."""
    while _locks:
        os.close(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
