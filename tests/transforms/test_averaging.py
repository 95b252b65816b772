"""`with_ema` of parameters in 16 bits: averages in fp32, in the place of the parameters and in checkpoints."""

from __future__ import annotations

import attrs
import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from tests.tiny_models import batch_of, loss_fn, program, whole_params

DECAY = 0.999


def half(step, dtype="bf16"):
    return fa.with_precision(step, fa.transforms.Precision(param=dtype, compute=dtype))


def rows(dtype=torch.bfloat16, seed=0):
    return tuple(value.to(dtype) for value in batch_of(8, seed))


def averaged_run(strategy, compiled):
    """The averages after each step, and those of the formula in float64."""
    step = fa.with_ema(half(loss_fn), DECAY)
    train_step = program(fa.compile(step, backend="eager") if compiled else step, strategy=strategy)
    state = train_step.init(seed=0)
    expected = {name: value.double() for name, value in whole_params(state).items()}
    for number in range(20):
        state, _ = train_step(state, rows(seed=number))
        for name, value in whole_params(state).items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * value.double()
    result = {name: fa.tree.whole(value).clone() for name, value in state.ema.items()}
    train_step.close()
    return result, expected


@pytest.mark.long_except(r"eager|local")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_averages_of_bf16_parameters_move(pools, strategy, ranks, compiled):
    """In bf16 they stayed: a thousandth of a difference is less than half of the last digit."""
    for averages, expected in pools.run(ranks, averaged_run, strategy, compiled):
        for name, value in averages.items():
            assert value.dtype is torch.float32
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-7)


@pytest.fixture
def begun():
    with fa.start(device="cpu"):
        train_step = program(fa.with_ema(half(loss_fn), 0.5))
        state = train_step.init()
        for number in range(2):
            state, _ = train_step(state, rows(seed=number))
        yield train_step, state


def same(first, second):
    return fa.tree.allclose(first, second, rtol=0, atol=0)


def test_parameters_are_back_to_the_bit_after_the_averages(begun):
    train_step, state = begun
    before = fa.snapshot(state)
    with train_step.averaged(state):
        rounded = {name: value.bfloat16() for name, value in before.ema.items()}
        assert same(dict(state.params), rounded)
        assert same(dict(state.ema), dict(before.ema))
    assert same(fa.snapshot(state), before)


def test_a_checkpoint_with_averages_in_bf16_still_restores(begun, tmp_path):
    train_step, state = begun
    old = fa.snapshot(state)
    fa.save(tmp_path, attrs.evolve(old, ema={name: value.bfloat16() for name, value in old.ema.items()}))
    state, _ = train_step(state, rows(seed=5))
    state = fa.restore(tmp_path, like=state)
    assert same(dict(state.ema), {name: value.bfloat16().float() for name, value in old.ema.items()})
    assert same(dict(state.params), dict(old.params))
    train_step(state, rows(seed=6))


def test_parameters_of_another_dtype_do_not_restore(begun, tmp_path):
    _, state = begun
    old = fa.snapshot(state)
    fa.save(tmp_path, attrs.evolve(old, ema={name: value.double() for name, value in old.ema.items()}))
    with pytest.raises(errors.TreeMismatchError, match="float64"):
        fa.restore(tmp_path, like=state)
