"""Modules that arrive in evaluation mode, whole or in part, and the modes after evaluations."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from tests.tiny_models import batch_of, loss_fn, program


@pytest.fixture(autouse=True)
def world():
    with fa.start(device="cpu") as started:
        yield started


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.mix(x)))


class Wrapped(nn.Module):
    """A root in training mode around a body, as `get_peft_model(from_pretrained(...))` is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body().eval()
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        return self.out(self.drop(self.body(x)))


class Merging(Wrapped):
    """A model that does work of its own as it changes its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.merged = False
        self.switched = 0

    def train(self, mode=True):
        super().train(mode)
        self.switched += self.merged == mode
        self.merged = not mode
        return self


def modes(train_step):
    return {name: module.training for name, module in train_step.engine.layout.model.named_modules()}


def shards():
    return fa.shard(DataLoader(TensorDataset(*batch_of(8)), batch_size=4))


def failing(model, batch):
    raise ZeroDivisionError


def fail(train_step, state):
    with pytest.raises(ZeroDivisionError):
        train_step.look(state, failing, None)


INTERRUPTIONS = {
    "evaluate": lambda train_step, state: fa.evaluate(train_step, state, loss_fn, shards()),
    "look": lambda train_step, state: train_step.look(state, lambda model: model(batch_of(2)[0])),
    "look in training mode": lambda train_step, state: train_step.look(
        state, lambda model: model.eval()(batch_of(2)[0]), train=True
    ),
    "a look that raises": fail,
    "flops": lambda train_step, state: train_step.flops(state, batch_of(2)),
}


@pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp"])
@pytest.mark.parametrize("interruption", INTERRUPTIONS)
@pytest.mark.filterwarnings("ignore:the model keeps")
def test_each_module_keeps_the_mode_in_which_it_arrived(strategy, interruption):
    """The first evaluation thawed a batch norm that was frozen by `.eval()`, and turned dropout on."""
    train_step = program(model=Wrapped, strategy=strategy)
    state = train_step.init()
    first = modes(train_step)
    assert first == {
        "": True, "drop": True, "out": True, "body": False, "body.mix": False, "body.norm": False, "body.drop": False,
    }  # fmt: skip
    mean = state.buffers["body.norm.running_mean"].clone()
    for _ in range(2):
        INTERRUPTIONS[interruption](train_step, state)
        assert modes(train_step) == first
        state, _ = train_step(state, batch_of(4))
        assert torch.equal(state.buffers["body.norm.running_mean"], mean)


@pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp"])
def test_losses_around_evaluations_are_those_of_a_raw_loop(strategy):
    """Dropout of probability 1 shows in each loss whether it is on."""

    def make():
        body = nn.Sequential(nn.Linear(3, 6), nn.Dropout(1.0)).eval()
        return nn.Sequential(body, nn.Linear(6, 1))

    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        output = loss_fn(model, batch_of(4))
        (output.total / output.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(output.total.item() / output.weight)

    with pytest.warns(UserWarning, match=r"keeps 1 Dropout in evaluation mode while it trains: 0\.1\. Call"):
        state = (train_step := program(model=make, strategy=strategy)).init()
    losses = []
    for _ in range(3):
        state, metrics = train_step(state, batch_of(4))
        losses.append(float(metrics["loss"]))
        fa.evaluate(train_step, state, loss_fn, shards())
    assert losses == pytest.approx(expected, rel=1e-6)


def test_a_root_in_evaluation_mode_trains_as_a_whole():
    train_step = program(model=lambda: Wrapped().eval())
    assert "evaluation mode" not in str(train_step.plan)
    state = train_step.init()
    assert "note: the model arrived in evaluation mode: all of it trains in training mode" in str(
        train_step.plan
    )
    assert all(modes(train_step).values())
    train_step.look(state, lambda model: model.training)
    assert all(modes(train_step).values())


def test_the_plan_names_modules_that_stay_in_evaluation_mode():
    with pytest.warns(UserWarning, match="1 BatchNorm1d and 1 Dropout in evaluation mode") as seen:
        (train_step := program(model=Wrapped)).init()
    assert len(seen) == 1
    note, _ = train_step.plan.notes
    assert "body.norm, body.drop. Call .train() on them in the factory" in note


def test_a_frozen_model_is_always_in_evaluation_mode(recwarn):
    train_step = fa.train_step(loss_fn, model=fa.distribute(Wrapped, "local"), optimizer=None)
    state = train_step.init()
    train_step.look(state, lambda model: model(batch_of(2)[0]), train=True)
    assert not any(modes(train_step).values())
    assert train_step.plan.notes == ("43 parameters, 0 trained, 43 on this rank",)
    assert not recwarn.list


@pytest.mark.filterwarnings("ignore:the model keeps")
def test_a_model_with_a_train_of_its_own_is_switched_once_an_evaluation():
    """An adapter that merges itself into its weights would round them at each switch."""
    train_step = program(model=Merging)
    state = train_step.init()
    model = train_step.engine.layout.model
    fa.evaluate(train_step, state, lambda m, b: fa.Mean(float(m.merged), weight=1), shards())
    assert model.switched == 2
    assert not model.merged
    assert not model.body.training
