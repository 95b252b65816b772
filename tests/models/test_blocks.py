"""Which modules are blocks."""

from __future__ import annotations

import pytest
from torch import nn

from fnaccel import errors
from fnaccel.models.blocks import find_units


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(2))})
        self.act = nn.Sequential(nn.ReLU(), nn.ReLU())
        self.head = nn.Linear(2, 50)


def names(units):
    return [name for name, _ in find_units(Model(), units, "here")]


def test_blocks_are_the_members_of_the_outermost_lists():
    assert names("block") == ["encoder.layers.0", "encoder.layers.1"]
    assert [
        n for n, _ in find_units(nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)), "block", "")
    ] == ["0", "2"]


def test_by_class_by_size_and_by_function():
    assert names(("Layer", "Embedding")) == ["embed", "encoder.layers.0", "encoder.layers.1"]
    assert names("Layer") == ["encoder.layers.0", "encoder.layers.1"]
    assert names(12) == ["encoder.layers.0.inner", "encoder.layers.1.inner", "head"]
    assert names(lambda name, module: name == "head") == ["head"]


def test_a_class_that_is_not_there_names_the_nearest():
    with pytest.raises(errors.ArgumentError, match="did you mean 'Layer'"):
        names("Layr")
