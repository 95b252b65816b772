"""Loops over loaders under context parallelism: remainders, windows, and rows of several lengths."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

import fnaccel as fa
from tests.strategies.context.model import CUT, Net, batch_of, loss_fn

ROWS, BATCH = 9, 4
SHARED = str(fa.context(2, cut=CUT))


def program(strategy, micro_batches=1):
    step = fa.accumulate(loss_fn, micro_batches) if micro_batches > 1 else loss_fn
    return fa.train_step(step, model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.3))


def scanned(strategy, window):
    """Losses of an epoch whose last batch has one row, and a score."""
    batch = batch_of(5, 0, (8,), rows=ROWS)
    rows = [{name: value[row] for name, value in batch.items()} for row in range(ROWS)]
    train_step = program(strategy, 2)
    shards = fa.shard(DataLoader(rows, batch_size=BATCH), window=window)
    losses = [
        float(metrics["loss"])
        for _, metrics in fa.scan(train_step, train_step.init(seed=0), shards, epochs=2)
    ]
    score = fa.evaluate(train_step, train_step.live_state, loss_fn, shards)
    return [*losses, float(score)]


@pytest.mark.long_except("^context")
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(("strategy", "ranks"), [(SHARED, 2), (f"fsdp(2) * {SHARED}", 4)])
def test_an_epoch_with_a_remainder(pools, strategy, ranks, window):
    expected = pools.run(1, scanned, "local", window)[0]
    for losses in pools.run(ranks, scanned, strategy, window):
        assert losses == pytest.approx(expected, abs=1e-5)


def of_two_lengths(strategy):
    train_step = program(strategy)
    window = fa.data.Window([batch_of(0, 0, (8,)), batch_of(1, 0, (16,))])
    _, metrics = train_step(train_step.init(seed=0), window)
    return float(metrics["loss"])


def test_micro_batches_of_two_lengths(pools):
    expected = pools.run(1, of_two_lengths, "local")[0]
    assert pools.run(2, of_two_lengths, SHARED) == [pytest.approx(expected, rel=1e-6, abs=1e-6)] * 2
