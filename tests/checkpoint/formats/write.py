"""Writes the checkpoint of the present format version: `python -m tests.checkpoint.formats.write`.

Run once when a version is new; what is checked in is never written again.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fnaccel.checkpoint import save
from fnaccel.checkpoint.format.manifest import VERSION
from fnaccel.state import Position, Seed, TrainState
from fnaccel.testing import RankPool

FOLDER = Path(__file__).parent


class Counter:
    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count, 3: None}

    def load_state_dict(self, state):
        self.count = state["count"]


def numbers(*shape, dtype=torch.float32, first=0):
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) + first).to(dtype)


def value(lay=lambda tensor, *dims: tensor, *, empty=False):
    """A state with one of each kind in it; `empty`: of the same shapes, with other values."""
    import numpy as np

    def made(*shape, **options):
        tensor = numbers(*shape, **options)
        return torch.zeros_like(tensor) if empty else tensor

    tied = made(3)
    params = {"a/b.weight": lay(made(5, 2), 0), "c": lay(made(4, 3, first=7), 1), "same": tied, "tied": tied}
    return TrainState(
        step=0 if empty else 12,
        updates=0 if empty else 11,
        params=params,
        buffers={"seen": made(dtype=torch.int64, first=5), "half": made(2, dtype=torch.bfloat16)},
        opt={"c": {"exp_avg": lay(made(4, 3, first=1), 1), "exp_avg_sq": lay(made(4, 3, first=2))}},
        scale={"scale": made(first=1024), "growth": made(dtype=torch.int32, first=3)},
        ema={"c": lay(made(4, 3, first=9), 0)},
        rng=Seed(0 if empty else 42),
        data=Position() if empty else Position(epoch=2, samples=96),
        extras={
            "text": "" if empty else "é\n",
            "bytes": b"" if empty else b"\x00\xff",
            "floats": [] if empty else [0.1, float("inf"), -0.0],
            "tuple": (0, True) if empty else (2**70, None),
            "keys": {1: 0, None: 0} if empty else {1: 2, None: 3},
            "array": np.zeros(2) if empty else np.array([1.5, -2.0]),
            "counter": Counter(0 if empty else 8),
        },
        transforms={"own": made(2, first=4)},
    )


def write(folder):
    mesh = init_device_mesh("cpu", (2,))

    def lay(tensor, dim=None):
        return distribute_tensor(
            tensor, mesh, [Replicate() if dim is None else Shard(dim)], src_data_rank=None
        )

    save(folder, value(lay), metadata={"note": "checked in"})


if __name__ == "__main__":
    import os

    os.chdir("/")  # no git commit in a file that is checked in
    with RankPool(2) as pool:
        pool.run(write, FOLDER / f"version-{VERSION}")
