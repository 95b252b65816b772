"""broadcast, gather_objects, broadcast_objects."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings

from fnaccel import tree
from fnaccel.collectives import broadcast, broadcast_objects, gather, gather_objects
from fnaccel.errors import ArgumentError, NotSerializableError, RankMismatchError
from fnaccel.testing import count_collectives
from fnaccel.world import mesh, world
from tests.collectives.test_gather import equal, rank, shifted
from tests.random_inputs import tensors, trees, worlds


def broadcast_shifted(value):
    src = world.current().size - 1
    mine = shifted(value, rank())
    found = broadcast(mine, src=src)
    return equal(found, shifted(value, src)) and equal(mine, shifted(value, rank()))


@settings(max_examples=40, deadline=None)
@given(value=trees(tensors()), size=worlds)
def test_everyone_gets_the_tensors_of_one(pools, value, size):
    assert all(pools.run(size, broadcast_shifted, value))


def counted():
    value = {"a": torch.ones(3), "b": torch.arange(5), "c": torch.tensor(True)}
    with count_collectives() as tensors_:
        broadcast(value)
    with count_collectives() as sent:
        broadcast_objects([1, 2])
    with count_collectives() as collected:
        gather_objects(rank())
    return tensors_.counts, sent.counts, collected.counts


def test_one_collective_for_all_leaves(pools):
    cast = {"all_gather": 1, "broadcast": 1}
    assert pools.run(2, counted) == [(cast, cast, {"all_gather": 1})] * 2


def within_an_axis():
    axis = mesh.build(world.current(), {"dp_replicate": 2, "dp_shard": 2})["dp_shard"]
    return (
        broadcast(torch.tensor(rank()), src=1, over=axis).item(),
        broadcast_objects(f"rank {rank()}", src=1, over=axis),
        gather_objects(rank(), over=axis),
    )


def test_src_counts_within_over(pools):
    assert pools.run(4, within_an_axis) == [(1, "rank 1", [0, 1])] * 2 + [(3, "rank 3", [2, 3])] * 2


def objects():
    mine = {"rank": rank(), "text": "x" * 1000 * rank(), "t": torch.full((rank(),), rank())}
    found = gather_objects(mine)
    assert tree.structure(found) == tree.structure([mine] * world.current().size)
    return [len(one["text"]) for one in found], [one["t"].tolist() for one in found]


def test_objects_of_any_size(pools):
    assert pools.run(3, objects) == [([0, 1000, 2000], [[], [1], [2, 2]])] * 3
    assert pools.run(1, objects) == [([0], [[]])]


def send(src):
    return broadcast_objects({"from": rank(), "data": [None] * rank()}, src=src)


def test_objects_of_one_rank(pools):
    assert pools.run(3, send, 2) == [{"from": 2, "data": [None, None]}] * 3
    assert pools.run(1, send, 0) == [{"from": 0, "data": []}]


def failing(call):
    lock = threading.Lock()
    bad = lock if rank() == 1 else "fine"
    try:
        if call == "gather":
            gather_objects(bad)
        elif call == "broadcast":
            broadcast_objects(bad, src=1)
        else:
            broadcast(torch.ones(1), src=7)
    except (NotSerializableError, RankMismatchError, ArgumentError) as error:
        return type(error), error.what, gather(torch.tensor(rank())).tolist()
    return None


@pytest.mark.parametrize("call", ["gather", "broadcast"])
def test_what_does_not_pickle_raises_on_every_rank(pools, call):
    other, own = pools.run(2, failing, call)
    assert own[0] is NotSerializableError
    assert own[1].startswith("lock does not pickle")
    assert other[0] is RankMismatchError
    assert other[1].startswith("rank 1 can't take part: lock does not pickle")
    assert own[2] == other[2] == [0, 1]


def test_there_is_no_such_rank(pools):
    assert pools.run(2, failing, "src") == [(ArgumentError, "there is no rank 7 among 2", [0, 1])] * 2
