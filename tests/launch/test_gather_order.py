"""Ranks that call the parts of a sharded model differently, or fail in it: an error by name, and no hang."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.strategies.gather_order import FORWARDS
from fnaccel.world import watcher
from fnaccel.world.world import current
from tests.faulty import run_ranks
from tests.tiny_models import whole

pytestmark = pytest.mark.launcher


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.out = nn.Linear(8, 1)

    def forward(self, x, *, skip=()):
        for index, block in enumerate(self.blocks):
            x = x if index in skip else block(x)
        return self.out(x)


class Loss:
    """The loss of all ranks but the last one, which goes wrong while `fault` is set."""

    def __init__(self, fault):
        self.fault = fault

    def __call__(self, model, x):
        fault = self.fault if current().rank == current().size - 1 else None
        if fault == "raises first":
            raise ValueError("a bad row")
        if fault == "raises after a block":
            model.blocks[0](x)
            raise ValueError("a bad row")
        y = model(x, skip={"skips one": (1,), "skips the last": (2,)}.get(fault, ()))
        y = model.out(x) if fault == "drops a graph" else y
        return fa.Mean(y.square().sum(), weight=len(x))


def rows(number):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + current().rank))


def made(loss, strategy="fsdp"):
    train_step = fa.train_step(
        fa.accumulate(loss, 2), model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.1)
    )
    return train_step, train_step.init(seed=0)


def first_step(fault, strategy, call):
    """All ranks raise, and then the same step without the fault is as it would have been."""
    usual, state = made(Loss(None), strategy)
    state, _ = usual(state, rows(0))
    expected = [whole(param) for param in state.params.values()]
    usual.close()
    loss = Loss(fault)
    train_step, state = made(loss, strategy)
    begin = {
        "step": lambda: train_step(state, rows(0)),
        "look": lambda: train_step.look(state, loss, rows(0)),
    }
    with pytest.raises((fa.errors.PeerLostError, ValueError)) as raised:
        begin[call]()
    said = f"{type(raised.value).__name__}: {raised.value}"
    loss.fault = None
    state, _ = train_step(state, rows(0))
    assert all(map(torch.equal, map(whole, state.params.values()), expected))
    return said


GATHERS, REDUCES = "gathers blocks.1", "reduces the parameters of no unit"
FAULTS = {
    "skips one": (f"rank 0 {GATHERS}, and rank 1 gathers blocks.2",) * 2,
    "skips the last": ("rank 0 gathers blocks.2, and rank 1 ends its forward",) * 2,
    "drops a graph": ("rank 0 gathers blocks.", "rank 1 "),
    "raises first": ("PeerLostError: rank 1 raised ValueError: a bad row", "ValueError: a bad row"),
    "raises after a block": ("PeerLostError: rank 1 raised ValueError: a bad row", "ValueError: a bad row"),
}


@pytest.mark.parametrize(
    ("fault", "call"),
    [(fault, "step") for fault in FAULTS] + [(fault, "look") for fault in FAULTS if "graph" not in fault],
)
def test_ranks_that_differ_before_the_first_update_raise_and_go_on(pools, fault, call):
    said = pools.run(2, first_step, fault, "fsdp", call)
    assert all(part in text for part, text in zip(FAULTS[fault], said, strict=True)), said


def test_parameters_without_a_gradient_on_one_rank(pools):
    for text in pools.run(2, first_step, "skips one", "fsdp(units=None)", "step"):
        lacking = "blocks.1.linear.weight, blocks.1.linear.bias"
        assert f"rank 0 {REDUCES}, and rank 1 {REDUCES} without a gradient of {lacking}" in text


@pytest.mark.long
def test_three_ranks_and_replicas(pools):
    for text in pools.run(3, first_step, "skips one", "fsdp", "step"):
        assert "gathers blocks.1, and rank 2 gathers blocks.2" in text
    for text in pools.run(4, first_step, "skips one", "hsdp(2, 2)", "step"):
        assert "gathers blocks.1, and rank 3 gathers blocks.2" in text


def skips_another_layer(strategy):
    """LayerDrop that draws on each rank: as many collectives, of other weights."""
    skipped: list[tuple[int, ...]] = [()]

    def loss_fn(model, x):
        return fa.Mean(model(x, skip=skipped[0]).square().sum(), weight=len(x))

    train_step, state = made(loss_fn, strategy)
    state, _ = train_step(state, rows(0))
    before = [whole(param) for param in state.params.values()]
    skipped[0] = (current().rank % 2,)
    with pytest.raises(fa.errors.RankMismatchError) as raised:
        train_step(state, rows(1))
    assert all(map(torch.equal, map(whole, state.params.values()), before))
    skipped[0] = (1,)
    state, _ = train_step(state, rows(1))
    return str(raised.value)


def test_ranks_that_use_other_layers_after_the_first_update(pools):
    for text in pools.run(2, skips_another_layer, "fsdp"):
        assert "rank 0 gathers blocks.1, gathers blocks.2, " in text
        assert "rank 1 gathers blocks.0, gathers blocks.2, " in text
    for text in pools.run(2, skips_another_layer, "fsdp(reshard_after_forward=False)"):
        assert "rank 0 gathers blocks.1, gathers blocks.2" in text


def looks(fault, call, folder):
    with fa.start(device="cpu", watchdog=0):
        loss = Loss(None)
        train_step, state = made(loss)
        state, _ = train_step(state, rows(0))
        loss.fault = fault
        try:
            if call == "step":
                train_step(state, rows(1))
            else:
                print(current().rank, "got", float(train_step.look(state, loss, rows(1)).total))
        except fa.errors.PeerLostError:
            Path(folder, f"raised{current().rank}").touch()
            raise
        except ValueError:  # the user catches it, and goes on to a call of the same size
            loss.fault = None
            time.sleep(0.2)  # the others have left their call, and make their files
            print("early" * (len(list(Path(folder).glob("raised*"))) < 2))
            train_step.look(state, loss, rows(1))


@pytest.mark.long_except(r"look")
@pytest.mark.parametrize("call", ["step", "look"])
def test_a_rank_that_fails_later_makes_no_call_before_the_others_know(tmp_path, monkeypatch, capfd, call):
    monkeypatch.setattr(watcher, "INTERVAL", 0.2)
    monkeypatch.setattr(watcher, "PATIENCE", 0.5)
    outcomes = run_ranks(looks, "raises after a block", call, str(tmp_path), folder=tmp_path)
    said = capfd.readouterr().out
    assert "got" not in said
    assert "early" not in said
    for outcome in outcomes:
        assert outcome.error == "PeerLostError", outcome
    for outcome in outcomes[:2]:
        assert "which raised ValueError in it: a bad row" in outcome.what, outcome


def fails_everywhere():
    """An error that all ranks raise at once ends no connection."""
    loss = Loss(None)
    train_step, state = made(loss)
    state, _ = train_step(state, rows(0))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            train_step.look(state, lambda model, x: 1 / 0, rows(1))
    state, _ = train_step(state, rows(1))
    return state.step


def test_an_error_on_all_ranks_lets_them_go_on(pools):
    assert pools.run(2, fails_everywhere) == [2, 2]


def looks_at_many():
    """Ranks that only look at a model compare no more than its first forwards."""
    train_step, state = made(Loss(None))
    order = train_step.engine.hooks.abandon.__self__
    found = []
    for number in range(FORWARDS + 1):
        train_step.look(state, Loss(None), rows(number))
        found.append(order.open)
    state, _ = train_step(state, rows(0))
    return found


def test_a_model_that_is_not_trained_is_compared_for_some_forwards(pools):
    assert pools.run(2, looks_at_many) == [[True] * (FORWARDS - 1) + [False] * 2] * 2


def fails_under_ddp(call, folder):
    """The last rank raises in its first or second step, or in the first call of a metric function."""
    with fa.start(device="cpu", watchdog=0):
        loss = Loss(None)
        train_step, state = made(loss, "ddp")
        if call != "first step":
            state, _ = train_step(state, rows(0))
        loss.fault = "raises first"
        if call == "metric":
            data = torch.utils.data.DataLoader(torch.ones(24, 8), batch_size=4)
            fa.evaluate(train_step, state, loss, fa.shard(data))
        train_step(state, rows(1))
        Path(folder, f"went on {current().rank}").touch()


@pytest.mark.long_except(r"first")
@pytest.mark.parametrize("call", ["first step", "second step", "metric"])
def test_replicas_say_the_error_of_the_rank_that_failed(tmp_path, monkeypatch, call):
    monkeypatch.setattr(watcher, "INTERVAL", 0.2)
    monkeypatch.setattr(watcher, "PATIENCE", 0.5)
    *others, failed = run_ranks(fails_under_ddp, call, str(tmp_path), folder=tmp_path)
    assert failed.error == "ValueError", failed
    assert "a bad row" in failed.what
    for outcome in others:
        assert outcome.error == "PeerLostError", outcome
        assert "ValueError" in outcome.what, outcome
    assert not list(tmp_path.glob("went on*"))


def catches_under_ddp(folder):
    """A rank that catches its error lets no other wait, and makes no call before they know."""
    with fa.start(device="cpu", watchdog=0):
        loss = Loss(None)
        train_step, state = made(loss, "ddp")
        state, _ = train_step(state, rows(0))
        loss.fault = "raises first"
        try:
            train_step(state, rows(1))
        except ValueError:
            loss.fault = None
            Path(folder, "caught").touch()
            time.sleep(1.0)


@pytest.mark.long
def test_an_error_that_is_caught_leaves_no_replica_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(watcher, "INTERVAL", 0.2)
    monkeypatch.setattr(watcher, "PATIENCE", 0.5)
    *others, _ = run_ranks(catches_under_ddp, str(tmp_path), folder=tmp_path)
    assert (tmp_path / "caught").exists()
    for outcome in others:
        assert outcome.error == "PeerLostError", outcome
        assert "which raised ValueError in it: a bad row" in outcome.what, outcome


def scored():
    """Data sets of other lengths on two ranks: no score of both."""
    train_step, state = made(Loss(None), "ddp")
    count = 10 if current().rank == 0 else 21
    data = torch.utils.data.DataLoader(torch.ones(count, 8), batch_size=4)
    with pytest.raises(fa.errors.RankMismatchError, match=r"of 3 batches.*of 6 batches"):
        fa.evaluate(train_step, state, Loss(None), fa.shard(data))
    return True


def test_metrics_of_different_data_are_refused(pools):
    assert pools.run(2, scored) == [True] * 2
