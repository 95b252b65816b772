"""From a path to a checkpoint: the path is the root directory of all checkpoints, or one checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from fnaccel.checkpoint import reading
from fnaccel.checkpoint.disk import publish as commit
from fnaccel.checkpoint.disk.directory import Directory, attempt, attempts
from fnaccel.checkpoint.format.manifest import Manifest
from fnaccel.errors import ArgumentError, CheckpointError


def find(path: Path, step: int | None, where: str) -> Path:
    """The checkpoint that a path means: the newest or one step of a root, or the path itself.

    Args:
        path: the directory that `fa.save` was given, or one checkpoint in it.
        step: None takes the newest.
        where: the public function, for messages.

    Raises:
        CheckpointError: there is none.

    Example:
        >>> path = fa.save("runs/gpt", state)
        >>> find(Path("runs/gpt"), None, "fa.restore").name
        'step-0000000000'
    """
    itself = commit.committed(path)
    if itself is not None:
        return itself
    committed = commit.checkpoints(path)
    chosen = [checkpoint.path for checkpoint in committed if step is None or checkpoint.step == step]
    if not chosen:
        steps = ", ".join(str(checkpoint.step) for checkpoint in committed)
        raise CheckpointError(
            f"{path} holds no checkpoint" + ("" if step is None else f" of step {step}"),
            where=where,
            fix=f"choose one of the steps {steps}" if steps else "give the directory that fa.save was given",
        )
    return chosen[-1]


def check_step(path: Path, checkpoint: Path, described: Manifest, step: int | None, where: str) -> None:
    """Check that a path which is one checkpoint is of the step that was asked for.

    Args:
        path: the path that the user gave.
        checkpoint: the path that `find` returned.
        described: its manifest.
        step, where: see `find`.

    Raises:
        ArgumentError: it is of another step.
    """
    if step is not None and checkpoint.parent != path and described.step != step:
        raise ArgumentError(
            f"{path} is the checkpoint of step {described.step}, and step {step} was asked for",
            where=where,
            fix="give the root above it, or leave the step out",
        )


def open_checkpoint(
    path: Path, step: int | None, where: str, stack: ExitStack, *, complete: bool = True
) -> tuple[Directory, Manifest]:
    """Find a checkpoint, hold it and read its manifest, in this process alone.

    Args:
        path, step, where: see `find`.
        stack: holds the directory until it closes.
        complete: also check that all files are there, with all their bytes.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ArgumentError: `path` is one checkpoint, and of another step.
    """
    read = reading.open_manifest if complete else reading.read_manifest
    for last in attempts():
        place = find(path, step, where)
        checkpoint = attempt(place, stack, lambda directory: (directory, read(directory)), last=last)
        if checkpoint is not None:
            check_step(path, place, checkpoint[1], step, where)
            return checkpoint
    raise AssertionError("the last attempt raises")
