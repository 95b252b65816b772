"""The kernels of attention: which one runs, in backward and recomputed blocks too, and what can't be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

import fnaccel as fa
from fnaccel import errors

# the operations that torch calls on the CPU
OPS = {"flash": "_scaled_dot_product_flash_attention_for_cpu", "math": "_scaled_dot_product_attention_math"}


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attend() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model, x):
    return fa.Mean(model(x).square().sum(), weight=x.numel())


class Seen(TorchDispatchMode):
    """The names of the operations that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def run(step):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    train_step = fa.train_step(step, model=fa.distribute(Model, "local"), optimizer=fa.sgd(0.1))
    state = train_step.init(seed=0)
    with Seen() as seen:
        state, metrics = train_step(state, x)
    return train_step, state, float(metrics["loss"]), seen.names


@pytest.fixture(autouse=True)
def world():
    with fa.start() as started:
        yield started


@pytest.mark.parametrize("remat", [False, True])
def test_the_kernel_that_was_chosen_runs_each_time(remat):
    """Two blocks: two calls forward. Recomputed: two more, in the backward pass."""
    step = fa.remat(loss_fn, units=("Attend",)) if remat else loss_fn
    *_, expected, plain = run(step)
    *_, flash, by_flash = run(fa.attention(step, "flash"))
    *_, math, by_math = run(fa.attention(step, "math"))
    calls = 4 if remat else 2
    assert plain.count(OPS["flash"]) == by_flash.count(OPS["flash"]) == calls
    assert by_math.count(OPS["flash"]) == 0
    assert by_math.count("bmm") > by_flash.count("bmm")
    assert flash == expected
    assert math == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scope", ["step", "loss", "block"])
def test_compiled_too(scope):
    """A mode of dispatch would keep torch.compile from compiling, so the profiler looks."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    for kernel, count in (("flash", 2), ("math", 0)):
        step = fa.compile(fa.attention(loss_fn, kernel), scope, backend="aot_eager", units=("Attend",))
        train_step = fa.train_step(step, model=fa.distribute(Model, "local"), optimizer=fa.sgd(0.1))
        state, first = train_step(train_step.init(seed=0), x)
        with torch.profiler.profile() as seen:
            train_step(state, x)
        names = [event.name for event in seen.events()]
        assert names.count(f"aten::{OPS['flash']}") == count
        assert float(first["loss"]) == pytest.approx(run(loss_fn)[2], rel=1e-5)


def test_torchs_switch_is_as_it_was():
    before = torch.backends.cuda.flash_sdp_enabled()
    run(fa.attention(loss_fn, "math"))
    assert torch.backends.cuda.flash_sdp_enabled() == before
    assert SDPBackend.FLASH_ATTENTION in torch.nn.attention._cur_sdpa_kernel_backends()


def test_a_kernel_that_does_not_fit_says_so_and_the_state_lives():
    train_step = fa.train_step(
        fa.attention(loss_fn, "efficient"), model=fa.distribute(Model, "local"), optimizer=fa.sgd(0.1)
    )
    state = train_step.init(seed=0)
    with pytest.raises(errors.CapabilityError, match="efficient attention can't compute this"):
        train_step(state, torch.randn(2, 5, 8))
    assert fa.snapshot(state).step == 0
    assert "attention" in str(train_step.plan)


def test_names():
    with pytest.raises(errors.UnknownNameError, match="'flash'"):
        fa.attention(loss_fn, "flsh")
    with pytest.raises(errors.ArgumentError, match="no kernel"):
        fa.attention(loss_fn)
