"""Selective recomputation: what is computed again, on every strategy, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import assert_close
from fnaccel.world.world import current
from tests import tiny_models
from tests.tiny_models import whole_params
from tests.transforms.attending import FLASH, Attend, Model, Seen, loss_fn


class Block(Attend):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        x = super().forward(x)
        return F.dropout(x + torch.tanh(self.mix(x)), 0.1, self.training)


class Net(Model):
    block = Block


def trained(strategy, save, compiled=""):
    step = loss_fn if save is None else fa.remat(loss_fn, save=save)
    if compiled:
        step = fa.compile(step, compiled, backend="aot_eager")
    train_step = fa.train_step(step, model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.1))
    state = train_step.init(seed=0)
    generator = torch.Generator().manual_seed(current().rank)
    for _ in range(2):
        state, _ = train_step(state, torch.randn(2, 5, 8, generator=generator))
    if compiled:  # a mode of dispatch would keep torch.compile from compiling
        return whole_params(state), {}
    with Seen() as seen:
        state, _ = train_step(state, torch.randn(2, 5, 8, generator=generator))
    names = ("addmm", FLASH, "tanh")
    return whole_params(state), {name: seen.names.count(name) for name in names}


# two blocks, two linear layers in each
COUNTS = {
    None: {"addmm": 4, FLASH: 2, "tanh": 2},
    "nothing": {"addmm": 8, FLASH: 4, "tanh": 4},
    "attention": {"addmm": 8, FLASH: 2, "tanh": 4},
    "matmuls": {"addmm": 4, FLASH: 2, "tanh": 4},
}


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_what_is_kept_is_not_computed_again(pools, strategy, ranks):
    expected, _ = pools.run(ranks, trained, strategy, None)[0]
    for save, counts in COUNTS.items():
        for params, found in pools.run(ranks, trained, strategy, save):
            assert_close(params, expected)
            assert found == counts, save


@pytest.mark.long
@pytest.mark.parametrize("scope", ["block", "loss"])
@pytest.mark.parametrize("save", ["attention", "matmuls"])
def test_compiled_blocks(pools, scope, save):
    expected, _ = pools.run(1, trained, "local", None, scope)[0]
    assert_close(pools.run(1, trained, "local", save, scope)[0][0], expected)


def test_a_recipe_says_what_is_kept():
    from fnaccel.config.applying import transformed

    step = transformed(fa.config.from_yaml("remat: attention"), loss_fn)
    assert [t.apply.save for t in step.transforms] == ["attention"]
    assert [t.apply.save for t in transformed(fa.config.Recipe(remat=True), loss_fn).transforms] == [
        "nothing"
    ]


def test_names():
    with pytest.raises(errors.UnknownNameError, match="'attention'"):
        fa.remat(loss_fn, save="atention")


class Statistics(nn.Module):
    """A block whose buffers its forward moves: running statistics, and vectors of a power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return torch.tanh(self.norm(self.mix(x)))


class WithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(Statistics() for _ in range(2))
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@pytest.mark.parametrize("save", ["nothing", "matmuls"])
def test_the_second_run_of_a_block_moves_no_buffer(save):
    """`num_batches_tracked` was 2 after one step, and the second run had other vectors than the first."""
    states = []
    for step in (tiny_models.loss_fn, fa.remat(tiny_models.loss_fn, save=save)):
        with fa.start(device="cpu"):
            train_step = tiny_models.program(step, model=WithStatistics)
            state = train_step.init(seed=0)
            for number in range(3):
                state, _ = train_step(state, tiny_models.batch_of(8, number))
            states.append(fa.snapshot(state))
            train_step.close()
    plain, again = states
    assert int(again.buffers["blocks.0.norm.num_batches_tracked"]) == 3
    assert fa.tree.allclose(dict(plain.buffers), dict(again.buffers), rtol=0, atol=0)
    assert fa.tree.allclose(dict(plain.params), dict(again.params), rtol=0, atol=0)
