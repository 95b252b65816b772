"""A rank that fails in the middle of a schedule ends all ranks by name, and a killed run resumes to the bit."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.world.hang_report import CODE
from tests.faulty import AT, RANKS, run_ranks

pytestmark = pytest.mark.launcher

FAULTS = {
    "raises": ("ValueError", "PeerLostError"),
    "kill -9": ("ended with -9", "PeerLostError"),
    "os._exit": ("ended with 0", "PeerLostError"),
}


LIMITS = {"is silent": 2.0}
"""Seconds of the watchdog, by fault. The others end before it."""


class Block(nn.Module):
    """Does something wrong in one forward of one stage."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.calls, self.wrong, self.at = 0, "", -1

    def forward(self, x):
        if self.training:
            self.calls += 1
            if self.wrong and self.calls == self.at:
                if self.wrong == "raises":
                    raise ValueError("boom in a block")
                if self.wrong == "kill -9":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.wrong == "is silent":
                    time.sleep(1000)
                os._exit(0)
        return torch.tanh(self.mix(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(RANKS)))

    def forward(self, x):
        return self.blocks(x)


def squares(model, batch):
    return fa.Mean((model(batch) - 1).square().sum(), weight=len(batch))


def rows(step):
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(step))


def train(faulty, fault, folder, steps=2 * AT):
    """The program of one rank: the third of four forwards of a step goes wrong on one stage."""
    with fa.start(device="cpu", watchdog=LIMITS.get(fault, 120.0)) as world:
        model = fa.distribute(Net, "pipeline()")
        train_step = fa.train_step(fa.accumulate(squares, 4), model=model, optimizer=fa.adamw(0.01))
        state = train_step.init(seed=0)
        if Path(folder, "state").exists():
            state = fa.restore(f"{folder}/state", like=state)
        if world.rank == faulty and fault:
            train_step.look(state, lambda net: net.blocks[faulty].__setattr__("wrong", fault))
            train_step.look(state, lambda net: net.blocks[faulty].__setattr__("at", 4 * AT + 3))
        elif fault:
            train_step.look(state, lambda net: None)
            train_step.look(state, lambda net: None)
        for step in range(state.step, steps):
            if step == AT and world.rank == faulty:
                Path(folder, "began").write_text(str(time.monotonic()))
            state, metrics = train_step(state, rows(step))
            if step == AT - 1:
                fa.save(f"{folder}/state", state)
        found = {name: fa.tree.whole(value) for name, value in state.params.items()}
        if world.is_main:
            torch.save((float(metrics["loss"]), found), f"{folder}/end.pt")


@pytest.mark.long_except(r"raises-1|kill -9-1|os._exit-0")
@pytest.mark.parametrize("faulty", [0, 1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_in_a_schedule_ends_all_by_name(tmp_path, fault, faulty):
    own, others = FAULTS[fault]
    outcomes = run_ranks(train, faulty, fault, str(tmp_path), folder=tmp_path)
    for outcome in outcomes:
        if outcome.rank == faulty:
            assert outcome.error == own, outcome
        else:
            assert outcome.error == others, outcome
            assert f"rank {faulty}" in outcome.what
        if fault == "raises" or outcome.rank != faulty:
            notes = (tmp_path / f"err{outcome.rank}").read_text()
            place = rf"on rank {outcome.rank}, in step {AT}, micro-batch \d, stage {outcome.rank}, whose batch is "
            assert re.search(place, notes), notes


@pytest.mark.parametrize("faulty", [0, pytest.param(1, marks=pytest.mark.long), 2])
def test_a_rank_that_is_silent_in_a_schedule_is_named_with_stage_and_micro_batch(tmp_path, faulty):
    outcomes = run_ranks(train, faulty, "is silent", str(tmp_path), folder=tmp_path)
    assert {outcome.error for outcome in outcomes} == {f"ended with {CODE}"}, outcomes
    reports = "".join((tmp_path / f"err{rank}").read_text() for rank in range(RANKS))
    place = f"step {AT}, forward, micro-batch 2, stage {faulty}"
    assert f"PeerLostError: rank {faulty} has been in {place} for " in reports, reports
    assert f"where: rank {faulty}: {place}\n" in reports
    assert f"forward 2, stage {faulty}" in reports
    assert f"rank {faulty} runs stage {faulty}" in reports
    assert "time.sleep(1000)" in reports


def test_a_run_that_was_killed_in_a_schedule_goes_on_to_the_bit(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    assert {each.error for each in run_ranks(train, 0, "", str(straight), folder=straight)} == {"returned"}
    run_ranks(train, 1, "kill -9", str(killed), folder=killed)
    assert not (killed / "end.pt").exists()
    assert {each.error for each in run_ranks(train, 0, "", str(killed), folder=killed)} == {"returned"}
    (loss, params), (other_loss, other_params) = (torch.load(f / "end.pt") for f in (straight, killed))
    assert loss == other_loss
    assert all(torch.equal(params[name], other_params[name]) for name in params)
