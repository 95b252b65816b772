"""What a training step costs in fnaccel, beside the same step by hand and in the peers.

    OMP_NUM_THREADS=1 python benchmarks/step_overhead.py [--only step,leaves,ddp,fsdp,data,start] [--quick]

Contestants run in the same processes, in turns, on the same model, data and seed; they must reach the same
losses first. What each row means is in `benchmarks/README.md`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import one_process
import starting
import two_ranks
from interleave import race, race_steps, slope
from models import Pairs, deep, mlp, rows
from options import begin
from report import Row, compare, publish
from torch.utils.data import DataLoader

import fnaccel as fa
from fnaccel.testing import RankPool

PARTS = ("step", "leaves", "ddp", "fsdp", "data", "start")
LEAVES = (4, 16, 64, 256)


def step_rows(blocks: int) -> list[Row]:
    """(a) An eager step of a tiny MLP, with loader, clip and schedule; then without the loader."""
    data = rows()
    loops = {
        "fnaccel": one_process.ours(mlp, data),
        "PyTorch by hand": one_process.by_hand(mlp, data),
        "PyTorch by hand, fused AdamW": one_process.by_hand(mlp, data, fused=True),
        "Accelerate": one_process.with_accelerate(mlp, data),
        "Lightning Fabric": one_process.with_fabric(mlp, data),
    }
    found = race_steps(loops, check=20, blocks=blocks, calls=50)
    what = "eager step, tiny MLP, with loader, clip, schedule"
    made = compare(what, found, {"PyTorch by hand": 1.0, "Accelerate": 0.6})
    pairs = Pairs(data)
    loops = {
        "fnaccel": one_process.ours(mlp, pairs),
        "PyTorch by hand": one_process.by_hand(mlp, pairs),
        "PyTorch by hand, fused AdamW": one_process.by_hand(mlp, pairs, fused=True),
    }
    made += compare(
        "same, a dataset of the user's own class", race_steps(loops, check=20, blocks=blocks, calls=30)
    )
    found = race_steps(resident(mlp, data[:32]), check=20, blocks=blocks, calls=50)
    return made + compare("same, no loader (one batch at hand)", found)


def resident(factory, batch) -> dict[str, object]:
    """Loops over one batch at hand."""
    return {
        "fnaccel": one_process.ours_resident(factory, batch),
        "PyTorch by hand": one_process.by_hand_resident(factory, batch),
        "PyTorch by hand, fused AdamW": one_process.by_hand_resident(factory, batch, fused=True),
    }


def leaves_rows(blocks: int) -> list[Row]:
    """(d) The same step over the number of parameter tensors, and the slope."""
    made: list[Row] = []
    taken: dict[str, list[float]] = {}
    data = rows(width=8)
    for leaves in LEAVES:
        loops = resident(lambda leaves=leaves: deep(leaves), data[:32])
        found = race_steps(loops, check=5, blocks=blocks, calls=max(5, 400 // leaves))
        made += compare(f"step of {leaves} parameter tensors", found)
        for name, seconds in found.items():
            taken.setdefault(name, []).append(seconds)
    slopes = {name: slope(list(LEAVES), seconds) for name, seconds in taken.items()}
    return made + compare("slope: each further parameter tensor", slopes)


def rank_rows(pool: RankPool, kind: str, what: str, blocks: int) -> list[Row]:
    """(b), (c) Two ranks that accumulate over four micro-batches."""
    found = pool.run(two_ranks.measure, kind, blocks, 4)[0]
    return compare(what, found, {f"{kind} by hand": 1.0}, "ms")


def data_rows(blocks: int) -> list[Row]:
    """(e) Time of one batch through `fa.shard` and through the DataLoader itself."""
    made: list[Row] = []
    for name, data in (("TensorDataset", rows()), ("own class", Pairs(rows()))):
        loader = DataLoader(data, batch_size=32, shuffle=True)
        shards = fa.shard(loader)

        def ours(shards=shards):
            while True:
                yield from shards

        def plain(loader=loader):
            while True:
                yield from loader

        contestants = {"fnaccel": ours().__next__, "plain DataLoader": plain().__next__}
        found = race(contestants, blocks=blocks, calls=128)
        made += compare(f"one batch of 32 through shard, {name}", found, {"plain DataLoader": 1.0})
    return made


def start_rows(rounds: int) -> list[Row]:
    """(f) Import and launch."""
    made = compare("import fnaccel", starting.imports(rounds), {"import torch": 1.1}, "ms")
    launched = starting.launches(rounds)
    return made + compare("launch an empty script, 2 ranks", launched, {"torchrun": 1.0}, "ms")


def main() -> None:
    """Run the parts asked for."""
    options = begin(__doc__, PARTS)
    blocks = 7 if options.quick else 41
    made: list[Row] = []
    # forked before anything here starts a thread or a peer's singleton
    with RankPool(2, timeout=900) as pool:
        with fa.start(device="cpu"):
            if "step" in options.parts:
                made += step_rows(blocks)
            if "leaves" in options.parts:
                made += leaves_rows(blocks // 2)
            if "data" in options.parts:
                made += data_rows(blocks)
        if "ddp" in options.parts:
            made += rank_rows(pool, "DDP", "2 ranks, accumulate 4, eager, small GPT", blocks // 2)
        if "fsdp" in options.parts:
            made += rank_rows(pool, "FSDP2", "2 ranks FSDP2, accumulate 4, small GPT", blocks // 2)
    if "start" in options.parts:
        made += start_rows(3 if options.quick else 15)
    publish("quick" if options.quick else "step_overhead", made, merge=not options.whole)


if __name__ == "__main__":
    main()
