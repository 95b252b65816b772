"""Flags of the launcher in scripts that know nothing of recipes."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.launcher
SCRIPT = """
import torch
from torch import nn
import fnaccel as fa

def loss_fn(model, batch):
    return fa.Mean(model(batch).square().sum(), weight=len(batch))

with fa.start() as world:
    train_step = fa.train_step(
        STEP, model=fa.distribute(lambda: nn.Sequential(nn.Linear(3, 3))MODEL), optimizer=fa.sgd(0.1)
    )
    state, metrics = train_step(train_step.init(), torch.ones(4, 3))
    world.print(train_step.plan)
"""


def script(step="loss_fn", model=""):
    return SCRIPT.replace("STEP", step).replace("MODEL", model)


def test_they_reach_any_script(launcher):
    flags = ("--strategy", "fsdp", "--precision", "bf16", "--clip-norm", 1.0, "--accumulate", 2)
    ended = launcher("-n", 2, "--cpu", *flags, launcher.write(script()))
    assert ended.code == 0, ended.err
    assert "on fsdp(): 2 ranks" in ended.out
    for name in ("with_precision", "accumulate", "clip_norm"):
        assert ended.out.count(f" {name} ") == 1
    said = "from the launcher: strategy='fsdp', precision='bf16', accumulate=2, clip_norm=1.0"
    assert said in ended.out


def test_without_flags_it_is_ddp(launcher):
    ended = launcher("-n", 2, "--cpu", launcher.write(script()))
    assert ended.code == 0, ended.err
    assert "on ddp(): 2 ranks" in ended.out
    assert "from the launcher" not in ended.out


@pytest.mark.long
def test_a_contradiction_ends_all_ranks_with_both_values(launcher):
    text = script("fa.with_precision(loss_fn, 'fp16')", ", 'ddp'")
    ended = launcher("-n", 2, "--cpu", "--precision", "bf16", launcher.write(text))
    assert ended.code == 1
    assert (
        "FlagMismatchError: the launcher says precision='bf16', and the script says with_precision("
        in ended.err
    )
    ended = launcher("-n", 2, "--cpu", "--strategy", "fsdp", launcher.write(text))
    assert "the launcher says strategy='fsdp', and the script says fa.distribute(..., ddp())" in ended.err


@pytest.mark.long
def test_what_only_a_recipe_has_ends_before_a_step(launcher):
    ended = launcher("-n", 2, "--cpu", "--set", "optimizer.lr=0.5", launcher.write(script()))
    assert (ended.code, ended.out) == (1, "")
    assert (
        "UnusedOverrideError: the launcher was told optimizer.lr=0.5, and the script never used it"
        in ended.err
    )
