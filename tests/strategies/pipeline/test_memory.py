"""The peak of a stage's process: its own blocks and one more, also while the state is made, carried and saved."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import pytest
from torch import nn

import fnaccel as fa
from fnaccel.testing import RankPool

MIB = 2**20
BLOCKS, STAGES = 8, 4


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(BLOCKS)))

    def forward(self, x):
        return self.blocks(x)


def squares(model, batch):
    return fa.Mean(model(batch).square().sum(), weight=len(batch))


def peak():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def grown(fn):
    """By how much the peak of this process rose in a call, and what it returned."""
    gc.collect()  # a train step of before is part of a cycle
    ctypes.CDLL(None).malloc_trim(0)  # free memory of the process that was forked would be taken unseen
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    result = fn()
    return peak() - before, result


def phases(width, folder, optimizer):
    """How far each phase raises the peak."""
    model = fa.distribute(lambda: Net(width), "pipeline()")
    train_step = fa.train_step(squares, model=model, optimizer=optimizer)
    found = {}
    found["init"], state = grown(lambda: train_step.init(seed=0))
    found["save"], _ = grown(lambda: fa.save(f"{folder}/state", state))
    found["restore"], state = grown(lambda: fa.restore(f"{folder}/state", like=state))
    other = fa.snapshot(state)
    found["adopt"], state = grown(lambda: train_step.adopt(other))
    whole = sum(value.numel() for value in state.params.values())
    train_step.close()
    return found, whole


OPTIMIZERS = {"adamw": (fa.adamw(0.1), 3), "momentum": (fa.sgd(0.1, momentum=0.9), 2)}
"""With the number of tensors of a parameter: itself and its slots. With fewer a whole model would stand out more."""


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_no_phase_holds_more_than_the_own_blocks_and_one_more(tmp_path, name):
    optimizer, tensors = OPTIMIZERS[name]
    width = 2048  # 16 MiB a block
    block = width * width * 4
    with RankPool(STAGES) as pool:  # processes of their own: others would give memory of before again
        pool.run(phases, 8, tmp_path / "warm", optimizer)  # imports, and threads
        floors = pool.run(phases, 8, tmp_path / "floor", optimizer)
        results = pool.run(phases, width, tmp_path / "state", optimizer)
    for (found, whole), (floor, _) in zip(results, floors, strict=True):
        assert whole == BLOCKS * width * width
        own = BLOCKS // STAGES * tensors * block
        for phase, size in found.items():
            assert size <= 1.15 * (own + block) + floor[phase] + 4 * MIB, (phase, found, floor)
        assert found["init"] >= 0.9 * own / tensors, "a peak that is not seen would pass"
