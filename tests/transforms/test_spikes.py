"""Losses far above the usual ones: warned about, skipped, or the end of the run."""

from __future__ import annotations

import logging
import math
import re

import pytest
import torch

import fnaccel as fa
from fnaccel.errors import ArgumentError, LossError
from tests.tiny_models import batch_of, loss_fn, program, whole_params

FACTORS = [*[1.0] * 6, 1000.0, 1.0, math.nan, 1.0]
SPIKES = [0.0] * 6 + [1.0, 0.0, 1.0, 0.0]


def _scaled(model, batch):
    """The loss of a batch, times its factor."""
    x, y, factor = batch
    loss = loss_fn(model, (x, y))
    return fa.Mean(loss.total * factor[0], weight=loss.weight)


def _batch(factor, rows=4):
    return (*batch_of(rows), torch.full((rows,), factor))


def _run(step, factors=FACTORS, **options):
    train_step = program(step, **options)
    state = train_step.init()
    found = []
    for factor in factors:
        state, metrics = train_step(state, _batch(factor))
        found.append((float(metrics["spike"]), whole_params(state), state.updates))
    return train_step, found


@pytest.fixture(autouse=True)
def world():
    with fa.start() as started:
        yield started


@pytest.mark.parametrize("compiled", [False, True])
def test_a_spike_is_skipped_and_named(caplog, compiled):
    step = fa.transforms.on_spike(_scaled, do="skip", warmup=4)
    with caplog.at_level(logging.WARNING, "fnaccel"):
        _, found = _run(fa.compile(step, backend="aot_eager") if compiled else step)
    assert [spike for spike, _, _ in found] == SPIKES
    for number in (6, 8):
        for name, value in found[number][1].items():
            assert torch.equal(value, found[number - 1][1][name])
    assert [float(updates) for _, _, updates in found] == [1, 2, 3, 4, 5, 6, 6, 7, 7, 8]
    assert len(caplog.messages) == 2
    assert re.fullmatch(
        r"the loss of step 7 is \d.*, far above the usual .*: its update is left out", caplog.messages[0]
    )
    assert caplog.messages[1] == "the loss of step 9 is nan: its update is left out"


def test_steps_that_are_no_spikes_are_those_without_the_transform():
    _, found = _run(fa.transforms.on_spike(_scaled, do="skip", warmup=4), FACTORS[:6])
    train_step = program(_scaled)
    state = train_step.init()
    for _ in range(6):
        state, _ = train_step(state, _batch(1.0))
    for name, value in whole_params(state).items():
        assert torch.equal(value, found[-1][1][name])


def test_a_second_spike_is_one_as_well():
    _, found = _run(
        fa.transforms.on_spike(_scaled, warmup=4), [*[1.0] * 6, 50.0, 50.0, 1.0], optimizer=fa.sgd(0.0)
    )
    assert [spike for spike, _, _ in found][5:] == [0.0, 1.0, 1.0, 0.0]


def test_a_warning_changes_nothing(caplog):
    with caplog.at_level(logging.WARNING, "fnaccel"):
        _, found = _run(fa.transforms.on_spike(_scaled, warmup=4), FACTORS[:7])
    assert [spike for spike, _, _ in found] == SPIKES[:7]
    assert any(not torch.equal(value, found[5][1][name]) for name, value in found[6][1].items())
    assert len(caplog.messages) == 1


def test_a_stop_comes_before_the_next_step_changes_anything():
    train_step, _ = _run(fa.transforms.on_spike(_scaled, do="stop", warmup=4), FACTORS[:7])
    state = train_step.live_state
    before = whole_params(state)
    with pytest.raises(LossError, match=r"the loss of step 7 is .*, far above the usual"):
        train_step(state, _batch(1.0))
    assert train_step.live_state is state
    assert all(torch.equal(value, before[name]) for name, value in whole_params(state).items())
    state, _ = train_step(state, _batch(1.0))  # a user may go on
    assert state.step == 8


def test_a_loss_that_stays_high_becomes_the_usual_one():
    _, found = _run(
        fa.transforms.on_spike(_scaled, warmup=4, window=10),
        [*[1.0] * 6, *[30.0] * 30],
        optimizer=fa.sgd(0.0),
    )
    spikes = [spike for spike, _, _ in found]
    assert spikes[6] == 1.0
    assert spikes[-5:] == [0.0] * 5


def test_the_mean_goes_through_checkpoints(tmp_path):
    train_step, _ = _run(fa.transforms.on_spike(_scaled, warmup=4), FACTORS[:6])
    fa.save(tmp_path, train_step.live_state)
    train_step.close()
    again = program(fa.transforms.on_spike(_scaled, warmup=4))
    state = fa.resume_or_init(tmp_path, again)
    _, metrics = again(state, _batch(1000.0))
    assert float(metrics["spike"]) == 1.0


def test_a_step_of_weight_nothing_is_no_spike():
    def empty(model, batch):
        return fa.Mean(_scaled(model, batch).total * 0, weight=0)

    _, metrics = (train_step := program(fa.transforms.on_spike(empty, warmup=0)))(
        train_step.init(), _batch(1.0)
    )
    assert metrics.get("spike", 0.0) == 0.0


@pytest.mark.parametrize("options", [{"do": "panic"}, {"deviations": 0.0}, {"window": 1}, {"warmup": -1}])
def test_bad_options_raise(options):
    with pytest.raises(ArgumentError, match=next(iter(options))):
        fa.transforms.on_spike(_scaled, **options)


def _two():
    with fa.start() as world:
        train_step = program(fa.transforms.on_spike(_scaled, do="skip", warmup=4), strategy="ddp")
        state = train_step.init()
        spikes = []
        for factor in FACTORS[:8]:
            # one rank alone has the spike
            state, metrics = train_step(state, _batch(factor if world.rank else 1.0))
            spikes.append(float(metrics["spike"]))
        return spikes


def test_ranks_decide_together(pools):
    assert pools.run(2, _two) == [SPIKES[:8]] * 2


def test_the_first_loss_is_no_spike_without_warmup():
    _, found = _run(fa.transforms.on_spike(_scaled, do="skip", warmup=0), FACTORS[:3])
    assert [spike for spike, *_ in found] == [0.0, 0.0, 0.0]


def test_a_stop_in_the_last_step_of_a_loop_is_raised_at_its_end():
    train_step = program(fa.transforms.on_spike(_scaled, do="stop", warmup=4))
    batches = [_batch(factor) for factor in FACTORS[:7]]
    steps = fa.scan(train_step, train_step.init(), fa.shard(batches))
    assert [next(steps)[0].step for _ in batches] == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(LossError, match=r"the loss of step 7 is .*, far above the usual"):
        next(steps)
