"""split_between_processes: divmod parts, or padded ones."""

from __future__ import annotations

from itertools import chain

import attrs
import pytest
import torch
from hypothesis import given

from fnaccel.collectives import split_between_processes
from fnaccel.errors import ArgumentError
from fnaccel.world.world import World
from tests.strategies import lengths, worlds


def ranks(size):
    """The worlds of all ranks; splitting communicates nothing, so they need no processes."""
    alone = World(
        rank=0,
        size=size,
        local_rank=0,
        local_size=size,
        machine=0,
        machines=1,
        device=torch.device("cpu"),
        backend="none",
    )
    return [attrs.evolve(alone, rank=rank, tokens=[]) for rank in range(size)]


def parts(inputs, size, *, pad=False):
    return [split_between_processes(inputs, pad=pad, world=one) for one in ranks(size)]


@given(n=lengths, size=worlds)
def test_parts_are_consecutive_and_balanced(n, size):
    inputs = list(range(n))
    found = parts(inputs, size)
    assert list(chain(*found)) == inputs == list(range(n))
    assert [len(part) for part in found] == [n // size + (rank < n % size) for rank in range(size)]


@given(n=lengths, size=worlds)
def test_padded_parts_are_equal_and_begin_with_the_inputs(n, size):
    found = parts(list(range(n)), size, pad=True)
    assert {len(part) for part in found} == {-(-n // size)}
    whole = list(chain(*found))
    assert whole[:n] == list(range(n))
    assert set(whole[n:]) <= {n - 1}


def test_tensors():
    x = torch.arange(6).reshape(3, 2)
    assert [part.tolist() for part in parts(x, 2)] == [[[0, 1], [2, 3]], [[4, 5]]]
    assert [part[:, 0].tolist() for part in parts(x, 2, pad=True)] == [[0, 2], [4, 4]]
    assert [len(part) for part in parts(x[:1], 3, pad=True)] == [1, 1, 1]
    assert [part.shape for part in parts(x[:0], 2, pad=True)] == [(0, 2), (0, 2)]


def test_dicts_tuples_and_what_the_caller_holds():
    inputs = {"a": [1, 2, 3], "b": torch.tensor([4, 5, 6]), "c": ("x", "y", "z")}
    first, second = parts(inputs, 2, pad=True)
    assert (first["a"], first["b"].tolist(), first["c"]) == ([1, 2], [4, 5], ("x", "y"))
    assert (second["a"], second["b"].tolist(), second["c"]) == ([3, 3], [6, 6], ("z", "z"))
    assert inputs["a"] == [1, 2, 3]
    alone = parts(inputs["a"], 1)[0]
    alone.append(4)
    assert inputs["a"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"a": [1, 2], "b": [1]}, "'a' has 2, 'b' has 1"),
        ("text", "str can't be cut"),
        (torch.tensor(1), "a 0-d tensor can't be cut"),
        ({"a": 3}, "int can't be cut"),
    ],
)
def test_what_can_not_be_split(inputs, message):
    with pytest.raises(ArgumentError, match=message):
        parts(inputs, 2)
