"""`ddp(buckets="torch")`: torch lays out its buckets after the first backward, in the order of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.errors import ArgumentError, CapabilityError
from fnaccel.strategies.footprint import footprint

SENT: list[list[tuple[int, ...]]] = []


class Backwards(nn.Module):
    """Its layers are made in another order than they run, so gradients come in another order than torch assumes."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(5, 1)
        self.first = nn.Linear(3, 4)
        self.middle = nn.Linear(4, 5)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def loss_fn(model, batch):
    return fa.Mean(model(batch).square().sum(), weight=len(batch))


def hook(group, bucket):
    SENT[-1] += [tuple(param.shape) for param in bucket.parameters()]
    work = torch.distributed.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def orders(buckets):
    """The order of parameters in the buckets of two steps."""
    SENT.clear()
    strategy = fa.ddp(buckets=buckets, hook=hook, bucket_mb=1e-5)
    with fa.start(device="cpu"):
        train_step = fa.train_step(loss_fn, model=fa.distribute(Backwards, strategy), optimizer=fa.sgd(0.1))
        state = train_step.init(seed=0)
        for _ in range(3):
            SENT.append([])
            state, _ = train_step(state, torch.ones(4, 3))
        return SENT[0], SENT[2], str(train_step.plan)


def test_torch_lays_them_out_by_the_order_of_gradients(pools):
    first, last, plan = pools.run(2, orders, "torch")[0]
    assert first != last
    assert last[:2] in ([(1,), (1, 5)], [(1, 5), (1,)])  # the layer that runs last has the first gradient
    assert "buckets='torch'" in plan
    assert "may differ in its last bits" in plan


def test_else_they_stay(pools):
    first, last, plan = pools.run(2, orders, "fixed")[0]
    assert first == last
    assert "may differ in its last bits" not in plan


def test_no_such_layout():
    with pytest.raises(ArgumentError, match=r"buckets='tourch'"):
        fa.ddp(buckets="tourch")


def captured():
    step = fa.compile(loss_fn, "step", backend="eager")
    with fa.start(device="cpu"):
        fa.train_step(step, model=fa.distribute(Backwards, 'ddp(buckets="torch")'), optimizer=fa.sgd(0.1))


def test_a_graph_has_buckets_of_its_own(pools):
    with pytest.raises(CapabilityError, match=r"buckets='torch'"):
        pools.run(2, captured)


def test_its_buckets_are_counted():
    def large():
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))  # 4 MiB each

    def count(strategy):
        sizes = footprint(large, strategy, 2, optimizer=fa.sgd(0.1))
        return next(each.count for each in sizes.traffic if each.what == "gradients")

    assert count(fa.ddp(buckets="torch")) == 4  # one layer, then two of seven layers, then the last one
    assert count(fa.ddp()) == 8
    assert count(fa.ddp(buckets="torch", bucket_mb=4)) == 16
