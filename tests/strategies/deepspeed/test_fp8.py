"""Layers in fp8 under DeepSpeed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fnaccel as fa


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def of_ones(model, x):
    return fa.Mean((model(x) - 1).square().sum(), weight=x.numel())


def trained(strategy):
    """Losses of linear layers whose products are rounded to fp8."""
    step = fa.with_precision(of_ones, fa.transforms.Float8(emulate=True))
    train_step = fa.train_step(step, model=fa.distribute(Wide, strategy), optimizer=fa.adamw(0.01))
    state, losses = train_step.init(seed=0), []
    for number in range(6):
        torch.manual_seed(number)
        state, metrics = train_step(state, fa.split_between_processes(torch.randn(16, 32)))
        losses.append(float(metrics["loss"]))
    assert list(fa.transforms.float8_layers(train_step).converted) == ["up", "down"]
    train_step.close()
    return losses


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "zero3_init": True}], ids=str
)
def test_layers_in_fp8_are_those_of_ddp(pools, options):
    expected = pools.run(2, trained, fa.ddp())[0]
    for losses in pools.run(2, trained, fa.deepspeed(**options)):
        assert losses == pytest.approx(expected, rel=2e-2, abs=5e-3)
    assert expected[-1] < 0.5 * expected[0]
