"""Interleaved timing: contestants take turns in short blocks, so that noise of the machine affects all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

Samples = dict[str, list[float]]
"""Seconds per call of each contestant, one figure for each round."""


def turns(names: Sequence[str], rounds: int, warmup: int = 1) -> Iterator[tuple[bool, str]]:
    """(whether it counts, name) of each turn: the order rotates from round to round."""
    for number in range(-warmup, rounds):
        for place in range(len(names)):
            yield number >= 0, names[(number + place) % len(names)]


def race(contestants: Mapping[str, Callable[[], Any]], *, blocks: int, calls: int) -> Samples:
    """Seconds per call of each contestant, in `blocks` blocks of `calls` calls.

    One round before the first is thrown away. On several ranks a barrier stands before each block. The
    garbage collector runs between blocks, never within one.
    """
    taken: Samples = {name: [] for name in contestants}
    collecting = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()  # what torch itself has made costs 0.1 s a collection
    try:
        for counts, name in turns(list(contestants), blocks):
            seconds = timed_block(contestants[name], calls)
            if counts:
                taken[name].append(seconds)
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
    return taken


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
    loops: Mapping[str, Iterator[torch.Tensor]],
    *,
    check: int,
    blocks: int,
    calls: int,
    tolerance: float = 2e-4,
) -> Samples:
    """`race` over training loops that yield the loss of each step, after a check that their losses agree.

    Raises:
        SystemExit: the losses of the first `check` steps differ by more than `tolerance`: fp32 rounding.
    """
    agree({name: [float(next(loop)) for _ in range(check)] for name, loop in loops.items()}, tolerance)
    return race({name: loop.__next__ for name, loop in loops.items()}, blocks=blocks, calls=calls)


def agree(losses: Mapping[str, Sequence[float]], tolerance: float = 2e-4) -> None:
    """Raise if a contestant's losses are not those of fnaccel, by a relative tolerance: that of fp32."""
    expected = torch.tensor(losses["fnaccel"])
    for name, theirs in losses.items():
        if not torch.allclose(torch.tensor(theirs), expected, rtol=tolerance, atol=1e-5):
            raise SystemExit(f"{name} trains something else:\n  {theirs}\nfnaccel:\n  {losses['fnaccel']}")


def slopes(sizes: Sequence[int], measured: Sequence[Samples]) -> Samples:
    """Seconds per unit of size of each contestant, a line of least squares through each round."""
    return {
        name: [_slope(sizes, seconds) for seconds in zip(*(at[name] for at in measured), strict=True)]
        for name in measured[0]
    }


def _slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    mean, level = statistics.fmean(sizes), statistics.fmean(seconds)
    spread = sum((size - mean) ** 2 for size in sizes)
    return sum((s - mean) * (t - level) for s, t in zip(sizes, seconds, strict=True)) / spread
