"""Doing one thing on every rank, so that it succeeds on all of them or raises on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fnaccel.collectives import gather_objects
from fnaccel.errors import CheckpointError, FnaccelError
from fnaccel.world.world import World

T = TypeVar("T")


def together(
    world: World, where: str, fn: Callable[[], T], *, over: dist.ProcessGroup | None = None
) -> list[T]:
    """Call `fn` on every rank, then exchange the results of all ranks.

    Args:
        world: the ranks.
        where: the public function, for messages.
        fn: may fail on any rank. Its result must pickle.
        over: a group of all ranks to meet in, for a thread beside the one that trains.

    Raises:
        CheckpointError: it failed on another rank, or the file system refused, or another rank does another
            part of the work.
        FnaccelError: the error of `fn` on this rank.
    """
    failed: Exception | None = None
    result: T | None = None
    try:
        result = fn()
    except FnaccelError as error:
        failed = error
    except Exception as error:
        what, fix = f"{type(error).__name__}: {error}", "see the error above, which is the cause"
        if isinstance(error, OSError):
            what = f"{error.strerror or error} ({error.filename or 'while writing'})"
            fix = "give a directory with free space that every rank can read and write"
        failed = CheckpointError(what, where=f"{where} on rank {world.rank}", fix=fix)
        failed.__cause__ = error
    part = getattr(getattr(fn, "func", fn), "__qualname__", "")
    answers: list[tuple[str, str | None, Any]] = gather_objects(
        (part, _line(failed), result), over=over, world=world
    )
    if failed is not None:
        raise failed
    apart = False
    for rank, (other, problem, _) in enumerate(answers):
        apart = apart or other != part
        if problem is not None:
            report = CheckpointError(
                f"rank {rank} failed: {problem}", where=where, fix="see the full message on that rank"
            )
            report.follows = True
            raise report
    if apart:
        raise CheckpointError(
            "ranks are in different parts of a save or restore: an earlier call was cut off on some of them",
            where=where,
            fix="end the job and start it again: fa.resume_or_init goes on from the last complete checkpoint",
        )
    return [outcome for *_, outcome in answers]


def _line(error: Exception | None) -> str | None:
    return None if error is None else str(getattr(error, "what", error))
