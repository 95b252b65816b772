"""`with_ema` whose decay is a schedule, and the decays of `fa.schedules.ema_warmup`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fnaccel as fa
from fnaccel import errors
from tests.tiny_models import batch_of, loss_fn, program, whole, whole_params

WARMUP = fa.schedules.ema_warmup(0.9, power=0.75, inv_gamma=2.0, after=2)


def classic(updates):
    """A schedule of the user's, which compares numbers of the host."""
    return min(0.9, (1 + updates) / (10 + updates))


@pytest.mark.parametrize(
    ("schedule", "table"),
    [  # worked out by hand for update 0, 1, ...
        (fa.schedules.ema_warmup(0.9999, power=1.0), {0: 0.0, 1: 1 / 2, 2: 2 / 3, 9: 9 / 10, 10**6: 0.9999}),
        (fa.schedules.ema_warmup(0.6, power=1.0), {1: 0.5, 2: 0.6, 3: 0.6}),
        (fa.schedules.ema_warmup(0.9, power=1.0, least=0.55), {0: 0.0, 1: 0.55, 2: 2 / 3, 99: 0.9}),
        (fa.schedules.ema_warmup(0.9, power=0.5, inv_gamma=1.0), {3: 1 / 2, 8: 2 / 3, 15: 3 / 4}),
        (fa.schedules.ema_warmup(0.99, power=1.0, inv_gamma=4.0, after=3), {3: 0.0, 4: 1 / 5, 7: 1 / 2}),
        (fa.schedules.ema_warmup(0.9, power=None), {0: 0.0, 1: 2 / 11, 2: 3 / 12, 80: 0.9, 90: 0.9}),
        (fa.schedules.ema_warmup(), {0: 0.0, 7: 1 - 1 / 4, 26: 1 - 1 / 9}),
    ],
)
def test_values_of_the_formula(schedule, table):
    for updates, decay in table.items():
        assert schedule(updates) == pytest.approx(decay)
        assert float(schedule(torch.tensor(float(updates)))) == pytest.approx(decay)


def averaged(schedule, wrap, strategy="local", folder=None, steps=8):
    """The averages of a run, those of the formula, and the last metrics. Resumed halfway if told so."""
    train_step = program(wrap(fa.with_ema(loss_fn, schedule)), strategy=strategy)
    state, metrics = train_step.init(seed=0), {}
    expected = whole_params(state)
    count, rank = train_step.mesh.batch_size, train_step.mesh.batch_rank
    for number in range(steps):
        if folder is not None and number == steps // 2:
            fa.save(folder, state)
            state = fa.restore(folder, like=train_step.init(seed=1))
        rows = tuple(part.chunk(count)[rank] for part in batch_of(8, number))
        state, metrics = train_step(state, rows)
        for name, value in whole_params(state).items():
            expected[name] = torch.lerp(expected[name], value, 1 - schedule(number))
    return {name: whole(value) for name, value in state.ema.items()}, expected, metrics


WRAPS = {
    "eager": lambda step: step,
    "skipping": fa.skip_nonfinite,
    "captured": lambda step: fa.compile(step, scope="step"),
    "captured and skipping": lambda step: fa.compile(fa.skip_nonfinite(step), scope="step"),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("schedule", [WARMUP, classic], ids=["warmup", "classic"])
def test_averages_follow_the_schedule(schedule, wrap):
    with fa.start():
        averages, expected, metrics = averaged(schedule, WRAPS[wrap])
    assert_close(averages, expected, rtol=0.0, atol=1e-6)
    assert float(metrics["ema_decay"]) == pytest.approx(schedule(7))
    assert metrics.get("recompilations", 0) == 0


def on_ranks(strategy, folder):
    with fa.start():
        return averaged(WARMUP, WRAPS["eager"], strategy, folder)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_resumed(pools, tmp_path, strategy):
    for averages, expected, _ in pools.run(2, on_ranks, strategy, str(tmp_path)):
        assert_close(averages, expected, rtol=0.0, atol=1e-6)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.norm(x))


@pytest.mark.parametrize("wrap", WRAPS)
def test_buffers_too(wrap):
    step = WRAPS[wrap](fa.with_ema(loss_fn, WARMUP, buffers="average"))
    with fa.start():
        train_step = program(step, model=Normed)
        state = train_step.init(seed=0)
        expected = whole(state.buffers["norm.running_mean"])
        for number in range(6):
            state, _ = train_step(state, batch_of(8, number))
            expected = torch.lerp(expected, whole(state.buffers["norm.running_mean"]), 1 - WARMUP(number))
        assert_close(whole(state.ema["norm.running_mean"]), expected, rtol=0.0, atol=1e-6)


def test_the_pure_update_and_the_text_of_the_plan():
    with fa.start():
        train_step = program(fa.with_ema(loss_fn, WARMUP))
        assert "ema_warmup(decay=0.9, power=0.75" in str(train_step.plan)
        update = fa.pure(train_step)
        state = train_step.init(seed=0)
        values = update.values(state)
        for number in range(6):
            values, told = update(values, batch_of(8, number))
            state, metrics = train_step(state, batch_of(8, number))
            assert float(told["ema_decay"]) == pytest.approx(metrics["ema_decay"])
        assert_close(values["ema"], {name: whole(x) for name, x in state.ema.items()}, rtol=0.0, atol=1e-6)
        _, told = update(values, batch_of(8), ema_decay=0.25)
        assert float(told["ema_decay"]) == 0.25


def test_a_schedule_that_begins_outside():
    with pytest.raises(errors.ArgumentError, match=r"can't decay by 1\.5[\s\S]*\[0, 1\)"):
        fa.with_ema(loss_fn, lambda updates: 1.5)


def test_an_aux_of_the_same_name_is_no_decay():
    """Without a schedule the name belongs to the user."""

    def noted(model, batch):
        mean = loss_fn(model, batch)
        return fa.Mean(mean.total, weight=mean.weight, aux={"ema_decay": torch.tensor(0.125)})

    with fa.start():
        train_step = program(fa.with_ema(noted, 0.5, buffers="average"), model=Normed)
        state, metrics = train_step(train_step.init(seed=0), batch_of(8))
        moved = whole(state.buffers["norm.running_mean"]) * 0.5
        assert_close(whole(state.ema["norm.running_mean"]), moved)
        assert float(metrics["ema_decay"]) == 0.125
