"""Interleaved timing: contestants take turns in short blocks, so that noise of the machine hits all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist


def race(contestants: Mapping[str, Callable[[], Any]], *, blocks: int, calls: int) -> dict[str, float]:
    """Seconds per call of each contestant: the median over `blocks` blocks of `calls` calls.

    The order turns from round to round, and one round before the first is thrown away. On several ranks a
    barrier stands before each block. The collector of garbage runs between blocks, never within one.
    """
    names = list(contestants)
    taken: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()  # what torch itself has made costs 0.1 s a collection
    try:
        for number in range(-1, blocks):
            for place in range(len(names)):
                name = names[(number + place) % len(names)]
                seconds = timed_block(contestants[name], calls)
                if number >= 0:
                    taken[name].append(seconds)
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def timed_block(call: Callable[[], Any], calls: int) -> float:
    """Seconds for each of so many calls, after one that is not counted."""
    gc.collect()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    call()  # the first call after another contestant finds its own data out of the caches
    _finish()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    _finish()
    return (time.perf_counter() - began) / calls


def _finish() -> None:
    """Wait for the GPU, where one is used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def race_steps(
    loops: Mapping[str, Iterator[torch.Tensor]], *, check: int, blocks: int, calls: int
) -> dict[str, float]:
    """`race` over training loops that yield the loss of each step, once their losses are seen to agree.

    Raises:
        SystemExit: the losses of the first `check` steps differ by more than fp32 rounding.
    """
    first = {name: [float(next(loop)) for _ in range(check)] for name, loop in loops.items()}
    expected = torch.tensor(first["fnaccel"])
    for name, losses in first.items():
        if not torch.allclose(torch.tensor(losses), expected, rtol=2e-4, atol=1e-5):
            raise SystemExit(f"{name} trains something else:\n  {losses}\nfnaccel:\n  {first['fnaccel']}")
    return race({name: loop.__next__ for name, loop in loops.items()}, blocks=blocks, calls=calls)


def slope(sizes: list[int], seconds: list[float]) -> float:
    """Seconds per unit of size: the line of least squares through the measurements."""
    mean, level = statistics.fmean(sizes), statistics.fmean(seconds)
    spread = sum((size - mean) ** 2 for size in sizes)
    return sum((s - mean) * (t - level) for s, t in zip(sizes, seconds, strict=True)) / spread
