"""pad_across_processes and concatenate."""

from __future__ import annotations

import pytest
import torch

from fnaccel.collectives import concatenate, gather, pad_across_processes
from fnaccel.errors import ArgumentError, RankMismatchError, TreeMismatchError
from fnaccel.testing import count_collectives
from fnaccel.world import world
from tests.collectives.test_gather import rank


def pad(**options):
    mine = {
        "x": torch.full((rank() + 1, 2), rank() + 1.0),
        "b": torch.ones(rank() + 1, dtype=torch.bool),
        "scalar": torch.tensor(7),
    }
    found = pad_across_processes(mine, **options)
    return found["x"].tolist(), found["b"].tolist(), found["scalar"].item(), mine["x"].shape[0]


def test_at_the_end_or_at_the_beginning(pools):
    one, two = [1.0, 1.0], [2.0, 2.0]
    first, second = pools.run(2, pad)
    assert first == ([one, [0.0, 0.0]], [True, False], 7, 1)
    assert second == ([two, two], [True, True], 7, 2)
    first, _ = pools.run(2, pad, first=True, pad_value=-1)
    assert first == ([[-1.0, -1.0], one], [True, True], 7, 1)
    assert pools.run(1, pad) == [([one], [True], 7, 1)]


def pad_last():
    found = pad_across_processes([torch.ones(2, rank()), torch.ones(rank())], dim=-1, pad_value=5)
    return [list(leaf.shape) for leaf in found], gather(found)[0].shape


def test_negative_dim_and_empty_tensors(pools):
    assert pools.run(3, pad_last) == [([[2, 2], [2]], (6, 2))] * 3


def missing_dim():
    return [
        list(leaf.shape) for leaf in pad_across_processes([torch.ones(3), torch.ones(2, rank() + 1)], dim=1)
    ]


def test_a_leaf_without_the_dim_stays(pools):
    assert pools.run(2, missing_dim) == [[[3], [2, 2]]] * 2


def counts(leaves):
    value = [torch.ones(4) for _ in range(leaves)]
    with count_collectives() as same:
        found = pad_across_processes(value)
    with count_collectives() as ragged:
        padded = pad_across_processes([leaf[: 4 - rank()] for leaf in value])
    assert {leaf.shape for leaf in padded} == {(4,)}
    return found is value, same.counts, ragged.counts


def test_collectives_do_not_grow_with_the_tree(pools):
    one, two = {"all_gather": 1}, {"all_gather": 1, "all_reduce": 1}
    assert pools.run(2, counts, 16) == [(True, one, one)] * 2  # the sizes fit in the signature
    assert pools.run(2, counts, 600) == [(True, two, two)] * 2
    assert pools.run(1, counts, 16) == [(True, {}, {})]


def other_dim_differs():
    with pytest.raises(RankMismatchError) as caught:
        pad_across_processes({"x": torch.ones(rank(), 2 + rank())})
    return caught.value.what, world.current().size


def test_only_dim_may_differ(pools):
    expected = "ranks hold different trees: x is [*, 2] float32 on rank 0, [*, 3] float32 on rank 1"
    assert pools.run(2, other_dim_differs) == [(expected, 2)] * 2


def test_concatenate():
    first = {"a": torch.ones(1, 2), "b": torch.tensor(1)}
    second = {"a": torch.zeros(2, 2), "b": torch.tensor(2)}
    found = concatenate([first, second])
    assert found["a"].shape == (3, 2)
    assert found["b"].tolist() == [1, 2]
    assert concatenate([first["a"], first["a"]], dim=1).shape == (1, 4)


def test_concatenate_what_does_not_fit():
    with pytest.raises(ArgumentError, match="no trees"):
        concatenate([])
    with pytest.raises(TreeMismatchError, match=r"tree 1 is not built like tree 0; a, b"):
        concatenate([{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    with pytest.raises(ArgumentError, match="a is int"):
        concatenate([{"a": 1}])
