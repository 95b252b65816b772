"""`fa.Max` and `fa.Min` over batches, micro-batches and ranks, in losses and in metric functions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa

ROWS = 11  # in batches of 4: three ranks get a filler
DATA = torch.tensor([3.0, -1, 4, 1, -5, 9, 2, 6, -5.5, 3, 5])[:, None]
EXTREMES = {"high": 9.0, "low": -5.5, "each": [5.5, 9.0], "count": 4}


def extremes(rows):
    """The extremes of rows, and the most rows of one call."""
    pair = torch.stack([(-rows).amax(), rows.amax()])
    return {
        "high": fa.Max(rows.max()),
        "low": fa.Min(rows.min()),
        "each": fa.Max(pair),
        "count": fa.Max(len(rows)),
    }


def loss_fn(model, batch):
    return fa.Mean(model(batch[0]).square().sum(), weight=len(batch[0]), aux=extremes(batch[0]))


def build(step=loss_fn, strategy="ddp"):
    return fa.train_step(step, model=fa.distribute(lambda: nn.Linear(1, 1), strategy), optimizer=fa.sgd(0.0))


def plain(found):
    return {name: torch.as_tensor(value).tolist() for name, value in found.items() if name in EXTREMES}


def evaluated():
    train_step = build()
    shards = fa.shard(DataLoader(TensorDataset(DATA), batch_size=4))
    return plain(fa.evaluate(train_step, train_step.init(), lambda _, batch: extremes(batch[0]), shards))


def stepped(micro_batches):
    train_step = build(fa.accumulate(loss_fn, micro_batches))
    (batch,) = fa.shard(DataLoader(TensorDataset(DATA), batch_size=ROWS))
    _, metrics = train_step(train_step.init(), batch)
    return plain(metrics)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_they_are_those_of_all_rows(pools, ranks):
    for found in pools.run(ranks, evaluated):
        assert found == EXTREMES | {"count": -(-4 // ranks)}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_in_aux_of_a_step(pools, ranks, micro_batches):
    for found in pools.run(ranks, stepped, micro_batches):
        assert found | {"count": 4} == EXTREMES


def test_in_a_pure_update_and_for_each_row():
    with fa.start(device="cpu"):
        train_step = build(fa.accumulate(loss_fn, 3), "local")
        update = fa.pure(train_step)
        _, metrics = update(update.init(), (DATA,))
        assert plain(metrics) | {"count": 4} == EXTREMES
        rows = build(fa.per_example(loss_fn, clip=1.0), "local")
        _, metrics = rows(rows.init(), (DATA,))
        assert plain(metrics) | {"count": 4} == EXTREMES


@pytest.mark.parametrize("scope", ["loss", "step"])
@pytest.mark.long
def test_in_compiled_code(scope):
    with fa.start(device="cpu"):
        train_step = build(fa.compile(fa.accumulate(loss_fn, 2), scope=scope, backend="aot_eager"), "local")
        _, metrics = train_step(train_step.init(), (DATA,))
        assert plain(metrics) | {"count": 4} == EXTREMES


def test_nan_stays_nan_and_precisions_keep_the_kind():
    with fa.start(device="cpu"):
        train_step = build(fa.with_precision(loss_fn, "bf16"), "local")
        state, metrics = train_step(train_step.init(), (DATA,))
        assert plain(metrics) | {"count": 4} == EXTREMES
        rows = fa.shard(DataLoader(TensorDataset(torch.tensor([[1.0], [math.nan], [2.0]])), batch_size=1))
        found = fa.evaluate(train_step, state, lambda _, batch: fa.Max(batch[0].max()), rows)
        assert math.isnan(found)
