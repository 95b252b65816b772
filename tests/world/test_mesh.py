"""Axis arithmetic, and which rank gets which part of a batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fnaccel as fa
from fnaccel import errors
from fnaccel.world.mesh import build, resolve
from fnaccel.world.world import current


def test_the_free_degree_takes_what_is_left():
    assert resolve([("dp_replicate", 2), ("dp_shard", -1)], 8, "x") == {"dp_replicate": 2, "dp_shard": 4}
    assert resolve([], 1, "local()") == {}


@given(st.lists(st.sampled_from([-1, 1, 2, 3, 4]), max_size=2), st.integers(1, 12))
def test_a_layout_makes_up_the_world_or_raises(degrees, size):
    names = ["dp_replicate", "dp_shard"][: len(degrees)]
    pairs = list(zip(names, degrees, strict=True))
    try:
        found = resolve(pairs, size, "x")
    except errors.AxisProductError:
        fixed = math.prod(d for d in degrees if d != -1)
        assert size % fixed or degrees.count(-1) > 1 or (-1 not in degrees and fixed != size)
    else:
        assert math.prod(found.values()) == size


def test_nearest_layouts_are_named():
    with pytest.raises(errors.AxisProductError, match=r"dp_replicate=2 \* dp_shard=3"):
        resolve([("dp_replicate", 2), ("dp_shard", 4)], 6, "ddp(2) * fsdp(4)")


def test_nearest_layouts_of_three_axes_are_named():
    degrees = [("dp_replicate", 2), ("dp_shard", 3), ("tp", 2)]
    with pytest.raises(errors.AxisProductError) as caught:
        resolve(degrees, 8, "ddp(2) * fsdp(3) * tensor(2)")
    assert "dp_replicate=2 * dp_shard=2 * tp=2" in str(caught.value)


def coordinates():
    mesh = build(current(), {"dp_replicate": 2, "dp_shard": 2})
    batch = mesh["batch"]
    ranks = fa.collectives.gather_objects(mesh.batch_rank, over=mesh["dp_shard"])
    return batch.rank, batch.size, mesh.coordinate("dp_replicate"), mesh.coordinate("dp_shard"), ranks


def test_the_batch_axis_is_replicas_times_shards(pools):
    found = pools.run(4, coordinates)
    assert [one[:4] for one in found] == [(0, 4, 0, 0), (1, 4, 0, 1), (2, 4, 1, 0), (3, 4, 1, 1)]
    assert [one[4] for one in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_an_axis_that_is_not_there():
    with fa.start() as world, pytest.raises(errors.AxisProductError, match="no axis 'tp'"):
        build(world, {}).group("tp")


@pytest.mark.parametrize("degree", [0, -2, "2", True, 1.5])
def test_degrees_of_an_own_axis(degree):
    for degrees in ([("mine", degree)], [("mine", degree), ("dp_shard", -1)]):
        with pytest.raises(errors.AxisProductError, match=f"the axis mine can't have degree {degree!r}"):
            resolve(degrees, 4, "mine")


@pytest.mark.parametrize("ranks", ["4", 0, 2.0, True])
def test_ranks_that_are_no_number(ranks):
    for call in (
        lambda: fa.simulate(ranks=ranks),
        lambda: fa.strategies.footprint(lambda: nn.Linear(1, 1), "ddp", ranks),
    ):
        with pytest.raises(errors.ArgumentError, match="ranks can't train"):
            call()
    with pytest.raises(errors.ArgumentError, match="do not make machines of '2'"):
        fa.simulate(ranks=4, per_machine="2")
