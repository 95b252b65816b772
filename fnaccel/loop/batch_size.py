"""`fit_batch_size`: the largest batch that fits in memory, found by trying."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fnaccel.collectives import any_process
from fnaccel.errors import ArgumentError, FnaccelError, PeerLostError, require
from fnaccel.seeing.memory import is_out_of_memory
from fnaccel.world.world import World, current

R = TypeVar("R")


def fit_batch_size(
    attempt: Callable[[int], R], start: int, *, shrink: float = 0.9, world: World | None = None
) -> tuple[int, R]:
    """Call `attempt(batch_size)` with smaller and smaller sizes until it fits in memory.

    Only errors that say memory ran out are tried again. All ranks use the same size. If memory runs out on
    one rank alone in the middle of a step, the others wait for it there, and all ranks raise within seconds.

    Args:
        attempt: builds and runs the code that has to fit, such as one step. Called from scratch each time.
        start: the first size.
        shrink: each next size is this share of the last, rounded down: 128, 115, 103, ... for 0.9.

    Returns:
        The size that fitted, and the result of `attempt`.

    Raises:
        ArgumentError: not even a batch of 1 fits, or the arguments make no sense.
        PeerLostError: memory ran out on one rank alone, in the middle of a step.

    Example:
        >>> def one_step(size):
        ...     if size > 100:
        ...         raise torch.OutOfMemoryError("CUDA out of memory")
        ...     return "ran"
        >>> fa.fit_batch_size(one_step, start=256, shrink=0.5)
        (64, 'ran')
    """
    require(start >= 1, f"a batch of {start}", "fa.fit_batch_size", "start is 1 or more")
    require(0 < shrink < 1, f"shrink={shrink}", "fa.fit_batch_size", "shrink is between 0 and 1")
    active = current(world)
    size = start
    while size >= 1:
        result: Any = None
        try:
            result = attempt(size)
            failed = False
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = True
        if not _any_failed(failed, active, size):
            return size, result
        del result
        gc.collect()
        if active.device.type == "cuda":
            torch.cuda.empty_cache()
        size = int(size * shrink)
    raise ArgumentError(
        "not even a batch of one row fits in memory",
        where=f"fa.fit_batch_size(start={start})",
        fix="shard the model (fa.fsdp), recompute activations (fa.remat), or offload",
    )


def _any_failed(failed: bool, world: World, size: int) -> bool:
    """Whether memory ran out on any rank.

    Raises:
        PeerLostError: it ran out on this rank in the middle of a call, and another rank waits there.
    """
    log = world.calls
    if log is None:
        return any_process(failed, world=world)
    log.abandoned = log.count if failed and log.failed == log.count else 0
    log.why = "whose memory ran out in it: batches of one shape let memory run out on all ranks"
    try:
        return log.run("fa.fit_batch_size", any_process, failed, world=world)
    except FnaccelError as error:
        if not log.abandoned:
            raise
        name = dict(log.newest)[log.abandoned]
        raise PeerLostError(
            f"memory ran out on rank {world.rank} alone, in {name}, where other ranks wait for it",
            where=f"fa.fit_batch_size, with a batch of {size}",
            fix="give all ranks batches of one shape (pad to the longest), or begin with a smaller start=",
        ) from error
