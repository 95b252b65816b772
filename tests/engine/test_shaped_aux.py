"""Totals with dimensions: vectors and matrices in `fa.Sum` and `fa.Mean`, in aux and in `evaluate`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel import errors
from fnaccel.world.world import current
from tests.tiny_models import batch_of, loss_fn, program

ROWS, CLASSES = 11, 3


def labels_of(x, y):
    return x.sum(1).abs().long() % CLASSES, y[:, 0].gt(0).long() + x[:, 0].gt(0).long()


def confusion(x, y):
    first, second = labels_of(x, y)
    return torch.zeros(CLASSES, CLASSES, dtype=torch.int64).index_put_(
        (first, second), torch.ones_like(first), accumulate=True
    )


def values(x, y):
    """A matrix of counts, a total for each class with a weight for each class, and a vector with one weight."""
    table = confusion(x, y)
    return {
        "confusion": fa.Sum(table),
        "accuracy": fa.Mean(table.diagonal().float(), weight=table.sum(1)),
        "rows": fa.Mean(x.sum(0), weight=len(x)),
        "by_column": fa.Mean(table.float(), weight=table.sum(1, keepdim=True)),
        "array": {"of": fa.Sum(np.asarray(table.numpy()))},
        "count": fa.Sum(len(x)),
    }


def expected(rows=ROWS):
    x, y = batch_of(rows)
    table = confusion(x, y).double()
    weights = table.sum(1)
    return {
        "confusion": table,
        "accuracy": torch.where(weights > 0, table.diagonal() / weights, 0.0),
        "rows": x.double().mean(0),
        "by_column": torch.where(weights[:, None] > 0, table / weights[:, None], 0.0),
        "array": {"of": table},
        "count": torch.tensor(float(rows)),
    }


def with_aux(model, batch):
    x, y = batch
    mean = loss_fn(model, batch)
    return fa.Mean(mean.total, mean.weight, aux={k: v for k, v in values(x, y).items() if k != "array"})


def with_arrays(model, batch):
    mean = loss_fn(model, batch)
    return fa.Mean(mean.total, mean.weight, aux=values(*batch))


def trained(strategy, change):
    """The metrics of one step over all rows, which the ranks share unevenly."""
    step = {
        "plain": lambda: with_arrays,
        "accumulate": lambda: fa.accumulate(with_arrays, 2),
        "captured": lambda: fa.compile(with_aux, scope="step", backend="eager"),
        "captured in two": lambda: fa.compile(fa.accumulate(with_aux, 2), scope="step", backend="eager"),
    }[change]()
    train_step = program(step, strategy=strategy)
    state = train_step.init()
    world = current()
    sizes = {1: (11,), 2: (8, 3), 3: (6, 3, 2)}[world.size]
    start = sum(sizes[: world.rank])
    mine = tuple(part[start : start + sizes[world.rank]] for part in batch_of(ROWS))
    _, metrics = train_step(state, mine)
    train_step.close()
    return {name: metrics[name] for name in expected() if name in metrics}


def evaluated(strategy, batch_size, rows=ROWS):
    train_step = program(strategy=strategy)
    loader = DataLoader(TensorDataset(*batch_of(rows)), batch_size=batch_size)
    found = fa.evaluate(train_step, train_step.init(), lambda _, batch: values(*batch), fa.shard(loader))
    train_step.close()
    return found


def check(found, wanted):
    for name, value in wanted.items():
        if isinstance(value, dict):
            check(found.get(name, {}), value)
        elif name in found:
            torch.testing.assert_close(
                torch.as_tensor(found[name]).double().nan_to_num(), value.double(), rtol=1e-6, atol=1e-6
            )


@pytest.mark.long_except(r"^(?!.*captured)|1-local-captured$")
@pytest.mark.parametrize("change", ["plain", "accumulate", "captured", "captured in two"])
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "local"), (2, "ddp"), (3, "ddp"), (2, "fsdp")])
def test_aux_of_any_shape(pools, ranks, strategy, change):
    for found in pools.run(ranks, trained, strategy, change):
        assert {"confusion", "accuracy", "rows", "by_column", "count"} <= found.keys()
        check(found, expected())


@pytest.mark.parametrize("batch_size", [4, 11])
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "local"), (2, "ddp"), (3, "fsdp")])
def test_metrics_of_any_shape(pools, ranks, strategy, batch_size):
    for found in pools.run(ranks, evaluated, strategy, batch_size):
        assert found.keys() == expected().keys()
        check(found, expected())


def test_a_rank_without_rows_sends_zeros_of_the_shape(pools):
    for found in pools.run(2, evaluated, "ddp", 4, rows=1):
        check(found, expected(rows=1))


def differing(kind):
    def loss(model, batch):
        mean = loss_fn(model, batch)
        width = {"ranks": 2 + current().rank, "calls": len(batch[0])}.get(kind, 3)
        weight = torch.ones(4) if kind == "weight" else 1
        return fa.Mean(mean.total, mean.weight, aux={"inner": {"odd": fa.Mean(torch.ones(width), weight)}})

    train_step = program(fa.accumulate(loss, 2), strategy="ddp" if current().size > 1 else "local")
    train_step(train_step.init(), batch_of(7 if kind == "calls" else 6))


@pytest.mark.parametrize(
    ("ranks", "kind", "says"),
    [
        (2, "ranks", r"Mean 'inner/odd' of shape \[2\].*rank 1 has.*of shape \[3\]"),
        (1, "calls", r"fa.Mean 'inner/odd' changed its shape between micro-batches: \[3\] after \[4\]"),
        (1, "weight", r"fa.Mean 'inner/odd' has a total of shape \[3\] and a weight of shape \[4\]"),
    ],
)
def test_shapes_that_differ_raise_by_name(pools, ranks, kind, says):
    with pytest.raises(errors.LossError, match=says):
        pools.run(ranks, differing, kind)


def differing_scores(kind):
    rank = current().rank
    train_step = program(strategy="ddp" if current().size > 1 else "local")
    loader = DataLoader(TensorDataset(*batch_of(ROWS)), batch_size=4)

    def metric(_, batch):
        shape = {"ranks": (2, 3) if rank else (3, 2), "batches": (len(batch[0]),)}[kind]
        return {"odd": fa.Sum(torch.ones(shape))}

    fa.evaluate(train_step, train_step.init(), metric, fa.shard(loader))


def test_metrics_whose_shapes_differ_raise_by_name(pools):
    with pytest.raises(
        errors.LossError, match=r"fa.Sum 'odd' changed its shape between batches: \[3\] after \[4\]"
    ):
        pools.run(1, differing_scores, "batches")
    with pytest.raises(errors.RankMismatchError, match=r"Sum 'odd' of shape \[3, 2\]"):
        pools.run(2, differing_scores, "ranks")


def test_a_complex_sum_raises():
    """It came out as its real part, 0."""
    with fa.start(device="cpu"):
        train_step = program()
        state = train_step.init()
        shards = fa.shard(DataLoader(TensorDataset(*batch_of(8)), batch_size=4))
        with pytest.raises(fa.errors.LossError, match=r"is complex[\s\S]*value.real"):
            fa.evaluate(train_step, state, lambda model, batch: fa.Sum(batch[0].sum(0) * 1j), shards)
