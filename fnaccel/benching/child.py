"""`python -m fnaccel.benching.child FOLDER`: one rank of one scope, started by the launcher."""

from __future__ import annotations

import sys
from pathlib import Path

import fnaccel as fa
from fnaccel.benching.measuring import measure
from fnaccel.benching.subject import find_subject
from fnaccel.benching.task import Failed, Task, write
from fnaccel.errors import FnaccelError
from fnaccel.launch.failure import follows, shown
from fnaccel.world.world import World


def main(folder: Path) -> int:
    """Measure the task that a folder describes, and write the answer into the folder.

    Returns:
        The exit code: 0, or 1 if the measurement failed. The answer then has the error.
    """
    with fa.start() as world:
        return _answer(folder, world)


def _answer(folder: Path, world: World) -> int:
    task, setup = Task.read(folder), True
    try:
        subject = find_subject(task, world)
        setup = False
        measured = measure(subject, task.scope, task.steps, world)
    except Exception as error:
        write(folder, _failure(error, setup=setup), world.rank)
        return 1
    if world.is_main:
        write(folder, measured, world.rank)
    return 0


def _failure(error: Exception, *, setup: bool) -> Failed:
    is_ours = isinstance(error, FnaccelError)
    lines = [line.strip() for line in (error.what if is_ours else str(error)).splitlines() if line.strip()]
    first_line = lines[0] if lines else "it said nothing"
    return Failed(
        kind=type(error).__name__,
        what=first_line if is_ours else f"{type(error).__name__}: {first_line}",
        where=error.where if is_ours else "",
        fix=error.fix if is_ours else "",
        text=shown(error, error.__traceback__),
        setup=setup,
        follows=follows(error),
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
