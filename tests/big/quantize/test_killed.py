"""A 4-bit model trains a LoRA adapter, is killed by SIGKILL in a step, and goes on to the same bits."""

from __future__ import annotations

import os
import signal

import peft
import pytest
import torch
from torch.utils.data import DataLoader

import fnaccel as fa
from fnaccel.errors import FnaccelError
from fnaccel.testing import RankPool
from tests.big.quantize.models import empty, llama, made

pytestmark = pytest.mark.long

STEPS, EVERY, KILLED = 8, 2, 5
DATA = made(lambda: torch.randint(128, (40, 12)))


def adapted(base):
    model = empty(llama)
    fa.big.load(model, base, quantization=fa.big.quantization_of(base)).remove()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.2)
    return peft.get_peft_model(model, config)


def losses(model, rows):
    return fa.Mean(model(input_ids=rows, labels=rows).loss * len(rows), weight=len(rows))


def train(base, directory, strategy, victim=None):
    """Train to the last step, or to the step in which rank `victim` kills itself. Returns all bits."""
    calls = []

    def loss_fn(model, rows):
        calls.append(len(calls))
        if victim is not None and len(calls) > KILLED and fa.world.world.current().rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return losses(model, rows)

    model = fa.distribute(lambda: adapted(base), strategy)
    train_step = fa.train_step(fa.clip_norm(loss_fn, 1.0), model=model, optimizer=fa.adamw(1e-2))
    state = fa.resume_or_init(directory, train_step, seed=3)
    first = state.step
    shards = fa.shard(DataLoader(DATA, batch_size=8, shuffle=True))
    last = None
    for state, metrics in fa.scan(
        train_step, state, shards, steps=STEPS, save=fa.Autosave(directory, every=EVERY)
    ):
        last = float(metrics["loss"])
    assert state.step == STEPS
    trees = {name: dict(getattr(state, name)) for name in ("params", "buffers", "opt")}
    bits = {
        path: fa.tree.whole(value).clone() if isinstance(value, torch.Tensor) else value
        for path, value in fa.tree.items(trees)
    }
    return first, last, bits


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    model = fa.big.quantize(llama(), fa.big.Nf4(double=True, compute="fp32"))
    return fa.big.save_quantized(tmp_path_factory.mktemp("base") / "nf4", model)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "local()"), (2, "ddp()"), (2, "fsdp()")])
def test_a_killed_run_goes_on_to_the_same_bits(base, tmp_path, ranks, strategy):
    with RankPool(ranks, timeout=120) as pool:
        expected = pool.run(train, base, tmp_path / "whole", strategy)
    with pytest.raises(FnaccelError, match="died"), RankPool(ranks, timeout=120) as pool:
        pool.run(train, base, tmp_path / "killed", strategy, ranks - 1)
    assert [checkpoint.step for checkpoint in fa.checkpoint.checkpoints(tmp_path / "killed")][-1] == 4
    with RankPool(ranks, timeout=120) as pool:
        resumed = pool.run(train, base, tmp_path / "killed", strategy)
    for (_, loss, bits), (first, loss_after, bits_after) in zip(expected, resumed, strict=True):
        assert first == 4
        assert loss_after == loss
        assert sum(path.endswith("codes") for path in bits) == 14
        assert bits.keys() == bits_after.keys()
        for path, value in bits.items():
            assert (
                torch.equal(bits_after[path], value)
                if isinstance(value, torch.Tensor)
                else (bits_after[path] == value)
            ), path
