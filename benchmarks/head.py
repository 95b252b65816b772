"""The loss of a language model's head and its backward: time, and the memory that it adds.

    OMP_NUM_THREADS=1 python benchmarks/head.py [--quick]

Each contestant runs in a process of its own, which is warm. Its memory is what the peak of that process grows
by. All must reach the same loss and the same gradients first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import resource
import time

import torch
import torch.nn.functional as F
from interleave import agree, turns
from options import Options, begin
from report import Row, compare, publish

import fnaccel as fa
from fnaccel.testing import RankPool

PLAIN, TORCH = "F.cross_entropy", "F.linear_cross_entropy, 128 rows"
GOALS = {PLAIN: 1.0}
MEMORY = {PLAIN: 0.12}
_inputs: list[Any] = []


def ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """By fnaccel."""
    return fa.losses.linear_cross_entropy(hidden, weight, labels)


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """By whole logits."""
    return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")


def by_torch(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """By torch's own chunks, of a size that suits CPUs: with its default it takes many times as long."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=128)
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


CONTESTANTS: dict[str, Callable[..., torch.Tensor]] = {"fnaccel": ours, PLAIN: plain, TORCH: by_torch}


def prepare(rows: int, vocabulary: int, width: int) -> None:
    """Make the inputs of this process."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, width, generator=generator)).requires_grad_()
    _inputs[:] = hidden, weight, torch.randint(vocabulary, (rows,), generator=generator)


def measure(name: str) -> tuple[float, float, list[float]]:
    """Seconds of a loss and its backward, MiB by which the peak of the process has grown, and its values."""
    hidden, weight, labels = _inputs
    hidden.grad = weight.grad = None
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    loss = CONTESTANTS[name](hidden, weight, labels)
    loss.backward()
    taken = time.perf_counter() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return taken, grown, [float(loss.detach()), float(hidden.grad.norm()), float(weight.grad.norm())]


def rows_of(options: Options) -> list[Row]:
    """Time and memory."""
    rows, vocabulary, width = options.pick((8192, 50_257, 256), (2048, 50_257, 256), (64, 100, 8))
    pools = {name: RankPool(1, timeout=600.0) for name in CONTESTANTS}
    try:
        firsts = {}
        for name, pool in pools.items():
            pool.run(prepare, rows, vocabulary, width)
            firsts[name] = pool.run(measure, name)[0]
        agree({name: values for name, (_, _, values) in firsts.items()}, 1e-5)
        memory = {name: [max(grown, 1e-3)] for name, (_, grown, _) in firsts.items()}
        seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        for counts, name in turns(list(pools), options.pick(5, 3, 1)):
            taken, *_ = pools[name].run(measure, name)[0]
            if counts:
                seconds[name].append(taken)
    finally:
        for pool in pools.values():
            pool.close()
    what = f"loss of {rows:,} rows and its backward, vocabulary {vocabulary:,}, width {width}"
    return [
        *compare(f"{what}: time", seconds, GOALS, "s"),
        *compare(f"{what}: memory", memory, MEMORY, "MiB"),
    ]


def main() -> None:
    """Run it."""
    options = begin("head", __doc__ or "", (), ())
    publish(options, rows_of(options))


if __name__ == "__main__":
    main()
