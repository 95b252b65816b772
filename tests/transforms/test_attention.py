"""The kernels of attention: which one runs, in backward and recomputed blocks too, and what can't be."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch.nn.attention import SDPBackend

import fnaccel as fa
from fnaccel import errors
from tests.transforms.attending import FLASH, Model, Seen, loss_fn


def run(step):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    train_step = fa.train_step(step, model=fa.distribute(Model, "local"), optimizer=fa.sgd(0.1))
    state = train_step.init(seed=0)
    start = fa.snapshot(state)
    train_step(state, x)  # before step 0 totals are checked, by two forwards more
    state = train_step.adopt(attrs.evolve(start, step=1))
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
    *_, flash, by_flash = run(fa.transforms.attention(step, "flash"))
    *_, math, by_math = run(fa.transforms.attention(step, "math"))
    calls = 4 if remat else 2
    assert plain.count(FLASH) == by_flash.count(FLASH) == calls
    assert by_math.count(FLASH) == 0
    assert by_math.count("bmm") > by_flash.count("bmm")
    assert flash == expected
    assert math == pytest.approx(expected, rel=1e-5)


@pytest.mark.long_except(r"loss")
@pytest.mark.parametrize("scope", ["step", "loss", "block"])
def test_compiled_too(scope):
    """A mode of dispatch would keep torch.compile from compiling, so the profiler looks."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    for kernel, count in (("flash", 2), ("math", 0)):
        step = fa.compile(
            fa.transforms.attention(loss_fn, kernel), scope, backend="aot_eager", units=("Attend",)
        )
        train_step = fa.train_step(step, model=fa.distribute(Model, "local"), optimizer=fa.sgd(0.1))
        state, first = train_step(train_step.init(seed=0), x)
        with torch.profiler.profile() as seen:
            train_step(state, x)
        names = [event.name for event in seen.events()]
        assert names.count(f"aten::{FLASH}") == count
        assert float(first["loss"]) == pytest.approx(run(loss_fn)[2], rel=1e-5)


def test_torchs_switch_is_as_it_was():
    before = torch.backends.cuda.flash_sdp_enabled()
    run(fa.transforms.attention(loss_fn, "math"))
    assert torch.backends.cuda.flash_sdp_enabled() == before
    assert SDPBackend.FLASH_ATTENTION in torch.nn.attention._cur_sdpa_kernel_backends()


def test_a_kernel_that_does_not_fit_says_so_and_the_state_lives():
    train_step = fa.train_step(
        fa.transforms.attention(loss_fn, "efficient"),
        model=fa.distribute(Model, "local"),
        optimizer=fa.sgd(0.1),
    )
    state = train_step.init(seed=0)
    with pytest.raises(errors.CapabilityError, match="efficient attention can't compute this"):
        train_step(state, torch.randn(2, 5, 8))
    assert fa.snapshot(state).step == 0
    assert "attention" in str(train_step.plan)


def test_names():
    with pytest.raises(errors.UnknownNameError, match="'flash'"):
        fa.transforms.attention(loss_fn, "flsh")
    with pytest.raises(errors.ArgumentError, match="no kernel"):
        fa.transforms.attention(loss_fn)
