"""What a training step costs in fnaccel, beside the same step by hand and in the peers.

    OMP_NUM_THREADS=1 python benchmarks/step_overhead.py [--only step,leaves,data,ddp,fsdp] [--quick]

Contestants run in the same processes, in turns, on the same model, data and seed; they must reach the same
losses first. What each row means is in `benchmarks/README.md`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import one_process
import torch
import two_ranks
from environment import present
from interleave import Samples, race, race_steps, slopes
from models import Pairs, deep, mlp, rows
from options import Options, begin
from report import Row, compare, publish
from torch import nn
from torch.utils.data import DataLoader

import fnaccel as fa
from fnaccel.testing import RankPool

PARTS = ("step", "leaves", "data", "ddp", "fsdp")
LEAVES = (4, 16, 64, 256)
Loops = dict[str, Iterator[torch.Tensor]]


def step_rows(options: Options) -> list[Row]:
    """An eager step of a tiny MLP, with loader, clip and schedule; then without the loader."""
    blocks, calls = options.pick(41, 7, 1), options.pick(50, 50, 5)
    data = rows()
    loops = {
        "fnaccel": one_process.ours(mlp, data),
        "PyTorch by hand": one_process.by_hand(mlp, data),
        "PyTorch by hand, fused AdamW": one_process.by_hand(mlp, data, fused=True),
        "Accelerate": one_process.with_accelerate(mlp, data),
        "Lightning Fabric": one_process.with_fabric(mlp, data),
    }
    samples = race_steps(present(loops), check=20, blocks=blocks, calls=calls)
    what = "eager step, tiny MLP, with loader, clip, schedule"
    table = compare(what, samples, {"PyTorch by hand": 1.0, "Accelerate": 0.6})
    pairs = Pairs(data)
    loops = {
        "fnaccel": one_process.ours(mlp, pairs),
        "PyTorch by hand": one_process.by_hand(mlp, pairs),
        "PyTorch by hand, fused AdamW": one_process.by_hand(mlp, pairs, fused=True),
    }
    samples = race_steps(loops, check=20, blocks=blocks, calls=calls)
    table += compare("same, a dataset of the user's own class", samples)
    samples = race_steps(resident(mlp, data[:32]), check=20, blocks=blocks, calls=calls)
    return table + compare("same, no loader (one batch at hand)", samples)


def resident(factory: Callable[[], nn.Module], batch: Any) -> Loops:
    """Loops over one batch at hand."""
    return {
        "fnaccel": one_process.ours_resident(factory, batch),
        "PyTorch by hand": one_process.by_hand_resident(factory, batch),
        "PyTorch by hand, fused AdamW": one_process.by_hand_resident(factory, batch, fused=True),
    }


def leaves_rows(options: Options) -> list[Row]:
    """The same step over the number of parameter tensors, and the slope."""
    table: list[Row] = []
    measured: list[Samples] = []
    data = rows(width=8)
    counts = options.pick(LEAVES, LEAVES, LEAVES[:2])
    for leaves in counts:
        loops = resident(lambda leaves=leaves: deep(leaves), data[:32])
        calls = options.pick(max(5, 400 // leaves), max(5, 400 // leaves), 5)
        measured.append(race_steps(loops, check=5, blocks=options.pick(20, 3, 1), calls=calls))
        table += compare(f"step of {leaves} parameter tensors", measured[-1])
    return table + compare("slope: each further parameter tensor", slopes(counts, measured))


def rank_rows(pool: RankPool, options: Options, kind: str, what: str) -> list[Row]:
    """Two ranks that accumulate over four micro-batches."""
    samples = pool.run(two_ranks.measure, kind, options.pick(20, 3, 1), options.pick(4, 4, 1))[0]
    return compare(what, samples, {f"{kind} by hand": 1.0}, "ms")


def data_rows(options: Options) -> list[Row]:
    """Time of one batch through `fa.shard` and through the DataLoader itself."""
    table: list[Row] = []
    for name, data in (("TensorDataset", rows()), ("own class", Pairs(rows()))):
        loader = DataLoader(data, batch_size=32, shuffle=True)
        contestants = {
            "fnaccel": _forever(fa.shard(loader)).__next__,
            "plain DataLoader": _forever(loader).__next__,
        }
        samples = race(contestants, blocks=options.pick(41, 7, 1), calls=options.pick(128, 128, 8))
        table += compare(f"one batch of 32 through shard, {name}", samples, {"plain DataLoader": 1.0})
    return table


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def main() -> None:
    """Run the parts asked for."""
    options = begin("step_overhead", __doc__, PARTS, ("Accelerate", "Lightning Fabric"))
    table: list[Row] = []
    # forked before anything here starts a thread or a peer's singleton
    with RankPool(2, timeout=900) as pool:
        with fa.start(device="cpu"):
            if "step" in options.parts:
                table += step_rows(options)
            if "leaves" in options.parts:
                table += leaves_rows(options)
            if "data" in options.parts:
                table += data_rows(options)
        if "ddp" in options.parts:
            table += rank_rows(pool, options, "DDP", "2 ranks, accumulate 4, eager, small GPT")
        if "fsdp" in options.parts:
            table += rank_rows(pool, options, "FSDP2", "2 ranks FSDP2, accumulate 4, small GPT")
    publish(options, table)


if __name__ == "__main__":
    main()
