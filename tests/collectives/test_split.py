"""split_between_processes: divmod parts, or padded ones."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import attrs
import pytest
import torch
from hypothesis import given

from fnaccel import tree
from fnaccel.collectives import split_between_processes
from fnaccel.data import Rows
from fnaccel.errors import ArgumentError
from fnaccel.world.world import World
from tests.random_inputs import lengths, worlds
from tests.row_names import row_name


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


class Pair(NamedTuple):
    x: torch.Tensor
    names: list[str]


@dataclass
class Record:
    x: torch.Tensor
    scale: float


def x_of(rows=4, first=0):
    return torch.arange(first, first + rows)


BATCHES = [  # inputs of 4 rows, and what rank 1 of 2 gets
    ((x_of(), x_of(4, 10)), (x_of(2, 2), x_of(2, 12))),
    ([x_of(), x_of(4, 10)], [x_of(2, 2), x_of(2, 12)]),
    ((x_of(), ["a", "b", "c", "d"], 0.5, "train"), (x_of(2, 2), ["c", "d"], 0.5, "train")),
    (Pair(x_of(), ["a", "b", "c", "d"]), Pair(x_of(2, 2), ["c", "d"])),
    (Record(x_of(), 0.5), Record(x_of(2, 2), 0.5)),
    (({"x": x_of()}, x_of(4, 10)), ({"x": x_of(2, 2)}, x_of(2, 12))),
    ({"x": x_of(), "pair": [x_of(), x_of()]}, {"x": x_of(2, 2), "pair": [x_of(2, 2), x_of(2, 2)]}),
    ({"x": x_of(), "rows": [x_of(7)] * 4}, {"x": x_of(2, 2), "rows": [x_of(7)] * 2}),
    (UserDict(x=x_of(), y=x_of()), UserDict(x=x_of(2, 2), y=x_of(2, 2))),
    ([x_of(2), x_of(3), x_of(4), x_of(5)], [x_of(4), x_of(5)]),
    ([{"a": 1}, {"a": 2}, {"a": 3}, {"a": 4}], [{"a": 3}, {"a": 4}]),
    (
        [torch.tensor(1), torch.tensor(2), torch.tensor(3), torch.tensor(4)],
        [torch.tensor(3), torch.tensor(4)],
    ),
    (("a", "b", "c", "d"), ("c", "d")),
    ((1, 2, 3, 4), (3, 4)),
    (Rows([x_of(), x_of(), x_of(), x_of(4, 1)]), Rows([x_of(), x_of(4, 1)])),
]


def equal(a, b):
    tree.learn(a)
    return type(a) is type(b) and tree.allclose(a, b)


@pytest.mark.parametrize(
    ("inputs", "expected"), BATCHES, ids=lambda value: f"{type(value).__name__} {row_name(value)}"
)
def test_batches_and_lists(inputs, expected):
    for pad in (False, True):
        first, second = parts(inputs, 2, pad=pad)
        assert type(first) is type(inputs)
        assert equal(second, expected)


def test_a_padded_batch_repeats_its_last_row():
    numpy = pytest.importorskip("numpy")
    first, second = parts((x_of(3), numpy.arange(3), ["a", "b", "c"]), 2, pad=True)
    assert [list(map(str, part)) for part in first] == [["tensor(0)", "tensor(1)"], ["0", "1"], ["a", "b"]]
    assert [list(map(str, part)) for part in second] == [["tensor(2)"] * 2, ["2", "2"], ["c", "c"]]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((x_of(4), x_of(3)), "0 has 4, 1 has 3"),
        ({"x": x_of(), "boxes": [x_of()] * 4}, r"4 tensors with 4 rows each(.|\n)*fa\.data\.Rows"),
    ],
)
def test_batches_that_can_not_be_split(inputs, message):
    with pytest.raises(ArgumentError, match=message):
        parts(inputs, 2)


@pytest.mark.parametrize("n", [0, 1, 4, 5])
@pytest.mark.parametrize("pad", [False, True])
def test_a_data_set_is_cut_by_select(n, pad):
    """Of Hugging Face's library, alone or as a column."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"k": list(range(n))})
    found = parts(rows, 2, pad=pad)
    assert [type(part) for part in found] == [datasets.Dataset] * 2
    assert [part["k"][:] for part in found] == parts(list(range(n)), 2, pad=pad)
    columns = parts({"data": rows, "y": torch.arange(n)}, 2, pad=pad)
    assert [part["data"]["k"][:] for part in columns] == [part["y"].tolist() for part in columns]
