"""Poisson sampling: each row is in each batch with one probability, whatever else is."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fnaccel as fa
from fnaccel.data.order import drawn
from fnaccel.errors import ArgumentError, LoaderError, UnknownNameError
from fnaccel.state import Position
from tests.tiny_models import loss_fn, program


@pytest.fixture(autouse=True)
def world():
    with fa.start():
        yield


def loader(n=40, size=8, **options):
    data = torch.arange(float(n))[:, None]
    return DataLoader(
        TensorDataset(data.expand(n, 3).contiguous(), torch.ones(n, 1)), batch_size=size, **options
    )


def keys(batches):
    return [[] if not batch.valid else batch.data[0][:, 0].long().tolist() for batch in batches]


def test_each_row_is_drawn_with_the_rate_and_apart_from_others():
    n, rate, batches = 50, 0.2, 4000
    seen = torch.zeros(batches, n)
    for number in range(batches):
        rows = drawn(n, rate, seed=1, epoch=0, number=number)
        assert rows == sorted(set(rows))
        seen[number, rows] = 1
    assert ((seen.mean(0) - rate).abs() < 5 * math.sqrt(rate * (1 - rate) / batches)).all()
    sizes = seen.sum(1)
    assert abs(sizes.var() / (n * rate * (1 - rate)) - 1) < 0.15  # as of independent rows
    covered = (seen[:, :-1] * seen[:, 1:]).mean(0)  # neighbours
    assert ((covered - rate**2).abs() < 5 * rate / math.sqrt(batches)).all()


@pytest.mark.parametrize(("n", "rate"), [(1, 0.5), (3, 1.0), (100_000, 1e-4), (7, 1e-12), (1000, 0.999)])
def test_any_rate(n, rate):
    counts = [len(drawn(n, rate, seed=0, epoch=0, number=number)) for number in range(50)]
    mean = n * rate
    assert abs(sum(counts) / 50 - mean) <= 5 * math.sqrt(mean * (1 - rate) / 50) + 1e-9


def test_an_epoch_and_a_position():
    shards = fa.shard(loader(), sampling="poisson", seed=3)
    batches = list(shards)
    assert len(batches) == len(shards) == 5
    assert len({batch.together for batch in batches}) > 1
    assert [batch.position for batch in batches] == [
        *(Position(0, 8 * k) for k in (1, 2, 3, 4)),
        Position(1, 0),
    ]
    assert all(batch.rows == 8 and batch.valid == batch.together for batch in batches)
    later = shards.at(Position(0, 16))
    assert len(later) == 3
    assert keys(later) == keys(batches)[2:]
    assert keys(shards.at(Position(1))) != keys(batches)
    assert keys(fa.shard(loader(), sampling="poisson", seed=4)) != keys(batches)


def test_empty_batches_do_not_count():
    shards = fa.shard(loader(40, 1), sampling="poisson")
    batches = list(shards)
    empty = [batch for batch in batches if not batch.valid]
    assert empty
    assert all(len(batch.data[0]) == 1 and batch.together == 0 for batch in empty)
    train_step = program()
    state = train_step.init()
    for state, metrics in fa.scan(train_step, state, shards):
        pass
    assert state.updates == 40 - len(empty)
    assert state.step == 40


def parts(dispatch):
    shards = fa.shard(loader(), sampling="poisson", seed=3, dispatch=dispatch)
    return [(keys([batch])[0], batch.first, batch.together) for batch in shards]


@pytest.mark.parametrize("dispatch", [False, True])
def test_ranks_share_each_batch(pools, dispatch):
    alone = keys(fa.shard(loader(), sampling="poisson", seed=3))
    both = pools.run(2, parts, dispatch)
    assert [a[0] + b[0] for a, b in zip(*both, strict=True)] == alone
    for found in both:
        for (mine, first, together), rows in zip(found, alone, strict=True):
            assert rows[first : first + len(mine)] == mine
            assert together == len(rows)


def accumulated(ranks):
    train_step = program(fa.accumulate(loss_fn, 2), strategy="ddp" if ranks > 1 else "local")
    state = train_step.init()
    losses = []
    for state, metrics in fa.scan(train_step, state, fa.shard(loader(24, 4), sampling="poisson"), epochs=3):
        losses.append(float(metrics["loss"]) if metrics["weight"] else 0.0)
    return losses, state.updates


def test_training_is_the_same_on_ranks(pools):
    alone = pools.run(1, accumulated, 1)[0]
    assert pools.run(2, accumulated, 2)[0] == (pytest.approx(alone[0], abs=1e-6), alone[1])


def test_an_evaluation_reads_every_row_once():
    train_step = program()
    state = train_step.init()
    shards = fa.shard(loader(), sampling="poisson")
    found = fa.evaluate(train_step, state, lambda model, batch: {"x": fa.Concat(batch[0][:, 0])}, shards)
    assert found["x"].tolist() == list(range(40))


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def test_bad_input():
    with pytest.raises(UnknownNameError, match="no sampling 'poison'") as caught:
        fa.shard(loader(), sampling="poison")
    assert "poisson" in str(caught.value)
    for option in (
        {"window": 2},
        {"shuffle": True},
        {"shuffle": False},
        {"presplit": True},
        {"remainder": "wrap"},
    ):
        with pytest.raises(ArgumentError, match=next(iter(option))):
            fa.shard(loader(), sampling="poisson", **option)
    sampler = torch.utils.data.RandomSampler(range(40), replacement=True)
    for bad in ([torch.ones(2)], DataLoader(Numbers(), batch_size=2), loader(sampler=sampler)):
        with pytest.raises(LoaderError, match="can be drawn"):
            fa.shard(bad, sampling="poisson")
    with pytest.raises(LoaderError, match="50 of 40"):
        next(iter(fa.shard(loader(size=50), sampling="poisson")))
    assert len(fa.shard(loader(size=9, drop_last=True), sampling="poisson")) == 4
