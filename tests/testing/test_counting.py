"""count_collectives against what DDP, FSDP2 and plain calls are known to issue."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fnaccel._torch import all_gather_single
from fnaccel.errors import ArgumentError
from fnaccel.testing import count_collectives
from fnaccel.world import world


def plain():
    rank, size = world.current().rank, world.current().size
    x = torch.ones(2)
    with count_collectives() as counted:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.all_gather([torch.empty(2) for _ in range(size)], x)
        all_gather_single(torch.empty(2 * size), x)
        dist.gather(x, [torch.empty(2) for _ in range(size)] if rank == 0 else None)
        dist.scatter(torch.empty(2), [x] * size if rank == 0 else None)
        dist.reduce(x, 0)
        dist.all_to_all_single(torch.empty(2), x)
        dist.barrier()
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
    return counted.counts, counted.total


def test_plain_calls_by_kind(pools):
    each = {
        "all_gather": 2,
        "all_reduce": 2,
        "all_to_all": 1,
        "barrier": 1,
        "broadcast": 1,
        "gather": 1,
        "reduce": 1,
        "scatter": 1,
    }
    first, second = pools.run(2, plain)
    assert first == (each | {"send": 1}, 11)
    assert second == (each | {"recv": 1}, 11)


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def ddp(micros, synced_each):
    model = torch.nn.parallel.DistributedDataParallel(layers())
    model(torch.ones(2, 4)).sum().backward()  # the first steps broadcast the order of the buckets
    model(torch.ones(2, 4)).sum().backward()
    with count_collectives() as counted:
        for micro in range(micros):
            model.require_backward_grad_sync = synced_each or micro == micros - 1
            model(torch.ones(2, 4)).sum().backward()
    return counted.counts


@pytest.mark.parametrize(("synced_each", "expected"), [(True, 4), (False, 1)])
def test_the_reducer_of_ddp(pools, synced_each, expected):
    assert pools.run(2, ddp, 4, synced_each) == [{"all_reduce": expected}] * 2


def fsdp(micros, synced_each):
    from torch.distributed.fsdp import fully_shard

    model = layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    with count_collectives() as counted:
        for micro in range(micros):
            model.set_requires_gradient_sync(synced_each or micro == micros - 1)
            model(torch.ones(2, 4)).sum().backward()
    return counted.result["reduce_scatter"]


@pytest.mark.parametrize(("synced_each", "expected"), [(True, 8), (False, 2)])
def test_fsdp2(pools, synced_each, expected):
    assert pools.run(2, fsdp, 4, synced_each) == [expected] * 2


def functional():
    from torch.distributed._functional_collectives import all_reduce

    with count_collectives() as counted:
        all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 1
    return counted.counts


def test_functional_collectives_count_once(pools):
    assert pools.run(2, functional) == [{"all_reduce": 1}] * 2


def test_nothing_counted_is_nothing():
    with count_collectives() as counted:
        with pytest.raises(ArgumentError, match="still being counted"):
            _ = counted.total
        torch.ones(2).sum()
    assert (counted.counts, counted.total, counted.result["all_reduce"]) == ({}, 0, 0)
