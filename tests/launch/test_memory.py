"""`fa.fit_batch_size` on ranks: memory that runs out in the middle of a step, on one rank and on all.

No time is asserted. A rank that waits for its process group's timeout counts as hung.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.world import watcher
from fnaccel.world.world import current
from tests.faulty import run_ranks

pytestmark = pytest.mark.launcher
STEP = "train_step(state, batch)"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Ranks are forks: they inherit the patience."""
    monkeypatch.setattr(watcher, "INTERVAL", 0.2)
    monkeypatch.setattr(watcher, "PATIENCE", 0.5)
    return lambda program, *arguments: run_ranks(program, *arguments, folder=tmp_path)


def search(faulty, strategy):
    """Search for a batch size while memory runs out in the backward pass of these ranks."""

    class RunsOut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")

    def loss(model, batch):
        x, y = batch
        hidden = model[0](x)
        if len(x) > 4 and current().rank in faulty:
            hidden = RunsOut.apply(hidden)
        return fa.Mean((model[1](hidden) - y).square().sum(), weight=len(x))

    def attempt(rows):
        model = fa.distribute(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), strategy)
        step = fa.train_step(loss, model=model, optimizer=fa.sgd(0.1))
        step(step.init(), (torch.ones(rows, 2), torch.ones(rows, 1)))
        step.close()

    with fa.start(device="cpu"):
        assert fa.fit_batch_size(attempt, 16, shrink=0.5)[0] == 4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_memory_that_runs_out_on_one_rank_alone_in_a_step_is_an_error_on_all(run, strategy):
    outcomes = run(search, [1], strategy)
    assert [outcome.error for outcome in outcomes] == ["PeerLostError"] * 3, outcomes
    assert f"memory ran out on rank 1 alone, in {STEP}, where other ranks wait" in outcomes[1].what
    assert "fa.fit_batch_size, with a batch of 16" in outcomes[1].what
    for rank in (0, 2):  # one of them hears of it from the records, or from the other one that has left
        assert re.search(r"OutOfMemoryError|rank [02]", outcomes[rank].what), outcomes
    said = {
        "ddp": "for rank 1, which raised OutOfMemoryError in it",
        "fsdp": "rank 1 raised OutOfMemoryError",
    }
    assert any(said[strategy] in outcomes[rank].what for rank in (0, 2)), outcomes


def test_memory_that_runs_out_on_all_ranks_in_a_step_is_tried_again(run):
    assert [outcome.error for outcome in run(search, [0, 1, 2], "fsdp")] == ["returned"] * 3
