"""`train_step.check_totals`: totals and weights are compared by one row and that row twice, at the user's call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel import errors
from fnaccel.world.world import current
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params


def rows_of(batch):
    return len(batch[0])


def squared(model, batch):
    x, y = batch
    return (model(x) - y).square()


def in_batch_recall(model, batch):
    """How many rows are their own nearest: of equal rows only the first is."""
    x = torch.cat([model(batch[0]), batch[0]], dim=1)
    nearest = torch.cdist(x, x).argmin(dim=1) == torch.arange(len(x))
    return fa.Mean(loss_fn(model, batch).total, weight=len(x), aux={"recall": fa.Mean(nearest.sum(), len(x))})


# what is returned, and what the error names
WRONG = {
    "a metric": (lambda m, b: fa.Mean(squared(m, b).mean(), weight=rows_of(b)), "the result holds a mean"),
    "one of several": (
        lambda m, b: {"error": fa.Mean(squared(m, b).mean(), rows_of(b))},
        "error holds a mean",
    ),
    "no graph": (lambda m, b: fa.Mean(float(squared(m, b).mean()), rows_of(b)), "the result holds a mean"),
    "a vector": (lambda m, b: fa.Mean(b[0].mean(0), weight=rows_of(b)), "takes a total"),
    "a sum as a mean": (
        lambda m, b: fa.Mean.of(squared(m, b).sum(), rows_of(b)),
        r"fa\.Mean\.of takes a mean[\s\S]*8 times too large",
    ),
    "aux": (
        lambda m, b: fa.Mean(
            squared(m, b).sum(), rows_of(b), aux={"error": fa.Mean(squared(m, b).mean(), weight=rows_of(b))}
        ),
        "aux/error holds a mean",
    ),
}
RIGHT = {
    "a loss": loss_fn,
    "in-batch recall": in_batch_recall,
    "a mean times its rows": lambda m, b: fa.Mean.of(squared(m, b).mean(), rows_of(b)),
    "a sum and a large L2": lambda m, b: fa.Mean(
        squared(m, b).sum() + 100.0 * m.inp.weight.square().sum(), weight=rows_of(b)
    ),
    "a mean of weight 1": lambda m, b: fa.Mean(squared(m, b).mean(), weight=1),
    "zero": lambda m, b: fa.Mean(0.0 * squared(m, b).sum(), weight=rows_of(b)),
    "constants": lambda m, b: {"temperature": fa.Mean(0.1, weight=1), "rows": fa.Sum(rows_of(b))},
}


@pytest.fixture(autouse=True)
def world():
    with fa.start(device="cpu") as started:
        yield started


@pytest.mark.parametrize("strategy", ["local", "fsdp"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_total_is_named(name, strategy):
    fn, message = WRONG[name]
    train_step = program(strategy=strategy)
    state = train_step.init()
    with pytest.raises(errors.LossError, match=message):
        train_step.check_totals(state, fn, batch_of(8))


@pytest.mark.parametrize("strategy", ["local", "fsdp"])
@pytest.mark.parametrize("name", RIGHT)
def test_no_other_is_accused(name, strategy):
    train_step = program(strategy=strategy)
    train_step.check_totals(train_step.init(), RIGHT[name], batch_of(8))


def test_the_loss_of_a_step_is_called_as_the_step_calls_it():
    """Under its weight and its transforms, with `info`, compiled."""

    def loss(model, batch, info):
        assert info.rows.tolist() == [0] * len(batch[0])
        return squared(model, batch).mean()

    step = fa.with_weight(fa.compile(loss, scope="loss", backend="eager"), rows_of)
    train_step = program(step)
    with pytest.raises(errors.LossError, match=r"loss under fa\.with_weight[\s\S]*return a sum"):
        train_step.check_totals(train_step.init(), loss, batch_of(8))


def test_a_function_that_raises_raises_its_own_error():
    def loss(model, batch):
        raise ZeroDivisionError("of the user")

    train_step = program()
    with pytest.raises(ZeroDivisionError, match="of the user"):
        train_step.check_totals(train_step.init(), loss, batch_of(8))


class Counting(Net):
    """A running buffer, and one that the first forward registers, of the size of its rows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        if not hasattr(self, "place"):
            self.register_buffer("place", torch.zeros(len(x), 1), persistent=False)
        return super().forward(self.norm(x)) + self.place


def test_buffers_modes_and_streams_are_as_before():
    def noisy(model, batch):
        return fa.Mean((squared(model, batch) + torch.rand(())).sum(), weight=rows_of(batch))

    train_step = program(model=Counting)
    state = train_step.init(seed=0)
    before, stream = whole_params(state), torch.get_rng_state()
    train_step.check_totals(state, noisy, batch_of(8))
    model = train_step.engine.layout.model
    assert not hasattr(model, "place")
    assert float(state.buffers["seen"]) == 0
    assert torch.equal(torch.get_rng_state(), stream)
    assert model.training
    assert fa.tree.allclose(whole_params(state), before, rtol=0, atol=0)
    batch = batch_of(8)
    state, _ = train_step(state, batch)
    assert float(state.buffers["seen"]) == 8


def one_sided():
    """A metric that is wrong for the rows of one rank only."""
    rank = current().rank

    def score(model, batch):
        x, y = batch
        mean = (model(x) - y).square().mean()
        return fa.Mean(mean * (len(y) if float(x[0, 0]) > 50 else 1), weight=len(y))

    x, y = batch_of(4, seed=rank)
    x[0, 0] += 100.0 * rank
    train_step = program(strategy="ddp")
    try:
        train_step.check_totals(train_step.init(), score, (x, y))
    except errors.LossError:
        return "accused"
    finally:
        train_step.close()
    return "trained"


def test_all_ranks_raise_or_none_does(pools):
    """A rank that raised alone would leave the others in a collective."""
    assert pools.run(2, one_sided) == ["accused", "accused"]
