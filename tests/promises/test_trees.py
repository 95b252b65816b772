"""Trees: named tuples keep their classes, numbers come out as a list, a move is traced whole."""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import torch

import fnaccel as fa

Plain = namedtuple("Plain", "a b")


class Typed(NamedTuple):
    a: torch.Tensor
    b: object = None


class Under(Plain):
    pass


def test_named_tuples_keep_their_types():
    for made in (Plain(torch.ones(2), None), Typed(torch.ones(2)), Under(torch.ones(2), "text")):
        moved = fa.tree.to(made, "meta")
        assert type(moved) is type(made)
        assert moved.a.is_meta
        assert moved.b == made.b
    nested = fa.tree.to({"x": [Typed(torch.ones(1))], "y": (torch.ones(1), 3)}, "meta")
    assert type(nested["x"][0]) is Typed
    assert isinstance(nested["y"], tuple)


def test_numbers_of_a_tree():
    values = {"a": torch.arange(3), "b": (torch.tensor(2.5), "text")}
    listed = fa.tree.map_tensors(lambda tensor: tensor.tolist(), values)
    assert listed == {"a": [0, 1, 2], "b": (2.5, "text")}


def test_a_move_is_traced_whole():
    move = torch.compile(lambda batch: fa.tree.to(batch, "cpu"), backend="eager", fullgraph=True)
    batch = {"x": torch.ones(2), "y": [torch.zeros(1), 3]}
    moved = move(batch)
    assert torch.equal(moved["x"], batch["x"])
    assert moved["y"][1] == 3
