"""Which checkpoint is meant: by the directory of all of them, or by its own."""

from __future__ import annotations

from pathlib import Path

from fnaccel.checkpoint import commit, manifest, reading
from fnaccel.errors import ArgumentError, CheckpointError


def find(path: Path, step: int | None, where: str) -> Path:
    """The checkpoint meant by a root (its newest, or one step), or by a checkpoint itself.

    Args:
        path: the directory that `fa.save` was given, or one checkpoint in it.
        step: None takes the newest.
        where: the public function, for messages.

    Raises:
        CheckpointError: there is none.
        ArgumentError: it is one checkpoint, and of another step.

    Example: `find(Path("runs/gpt"), None, "fa.restore")`.
    """
    if (path / manifest.FILE).is_file():
        if step is not None and (there := reading.open_manifest(path).step) != step:
            raise ArgumentError(
                f"{path} is the checkpoint of step {there}, and step {step} was asked for",
                where=where,
                fix="give the root above it, or leave the step out",
            )
        return path
    known = commit.checkpoints(path)
    chosen = [one.path for one in known if step is None or one.step == step]
    if not chosen:
        steps = ", ".join(str(one.step) for one in known)
        raise CheckpointError(
            f"{path} holds no checkpoint" + ("" if step is None else f" of step {step}"),
            where=where,
            fix=f"choose one of the steps {steps}" if steps else "give the directory that fa.save was given",
        )
    return chosen[-1]
