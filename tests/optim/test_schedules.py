"""Schedules: pure, equal on ints and tensors, and where they begin, peak and end."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fnaccel as fa
from fnaccel import errors

SCHEDULES = {
    "constant": fa.schedules.constant(0.3),
    "linear": fa.schedules.linear(0.3, 0.1, 10),
    "cosine": fa.schedules.cosine(0.3, 10, 0.01),
    "inverse_sqrt": fa.schedules.inverse_sqrt(0.3, warmup=4),
    "warmup_constant": fa.schedules.warmup_constant(0.3, warmup=4),
    "warmup_linear": fa.schedules.warmup_linear(0.3, warmup=4, total=20),
    "warmup_cosine": fa.warmup_cosine(0.3, warmup=4, total=20, end=0.03),
    "one_cycle": fa.schedules.one_cycle(0.3, total=20),
    "piecewise": fa.schedules.piecewise(0.3, boundaries=(5, 9), factors=(0.1, 0.5)),
    "joined": fa.schedules.joined(
        (fa.schedules.constant(0.1), fa.schedules.linear(0.1, 0.0, 5)), boundaries=(3,)
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@given(updates=st.integers(0, 60))
def test_ints_and_tensors_agree(name, updates):
    schedule = SCHEDULES[name]
    on_device = schedule(torch.tensor(float(updates)))
    assert isinstance(on_device, torch.Tensor)
    assert float(on_device) == pytest.approx(float(schedule(updates)), abs=1e-7)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_values(name):
    schedule = SCHEDULES[name]
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert hash(schedule) == hash(pickle.loads(pickle.dumps(schedule)))
    assert "0x" not in repr(schedule)


def test_where_they_begin_peak_and_end():
    warm = fa.warmup_cosine(0.3, warmup=4, total=20, end=0.03)
    assert [round(warm(u), 6) for u in (0, 1, 2, 3, 4)] == [0.075, 0.15, 0.225, 0.3, 0.3]
    assert warm(20) == pytest.approx(0.03)
    assert warm(500) == pytest.approx(0.03)
    assert fa.schedules.linear(1.0, 0.0, 4)(3) == 0.25
    assert fa.schedules.piecewise(1.0, boundaries=(2, 4), factors=(0.1, 0.1))(4) == pytest.approx(0.01)
    assert fa.schedules.inverse_sqrt(1.0, warmup=4)(16) == pytest.approx(0.5)
    cycle = fa.schedules.one_cycle(1.0, total=10, warmup=0.5, start_div=10.0)
    assert (cycle(0), cycle(5)) == (pytest.approx(0.1), pytest.approx(1.0))


def test_a_torch_scheduler_becomes_a_pure_function():
    def factory(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.1)

    schedule = fa.schedules.from_torch_scheduler(factory, lr=1.0)
    assert [round(schedule(u), 6) for u in (7, 0, 3, 2)] == [0.01, 1.0, 0.1, 1.0]


def test_a_schedule_that_needs_the_host_is_shown_in_the_plan():
    from tests.models import loss_fn, program

    with fa.start():
        step = fa.skip_nonfinite(loss_fn)
        assert "host read" in str(program(step, optimizer=fa.sgd(lambda u: 0.1 if u < 3 else 0.01)).plan)
        assert "host read" not in str(program(step, optimizer=fa.sgd(fa.schedules.cosine(0.1, 5))).plan)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fa.warmup_cosine(0.1, warmup=10, total=10),
        lambda: fa.schedules.linear(0.1, 0.0, 0),
        lambda: fa.schedules.joined((fa.schedules.constant(1.0),), boundaries=(3,)),
        lambda: fa.schedules.piecewise(0.1, boundaries=(1,), factors=()),
        lambda: fa.schedules.warmup_constant(0.1, warmup=0),
    ],
)
def test_schedules_that_cannot_be(make):
    with pytest.raises(errors.ArgumentError):
        make()
