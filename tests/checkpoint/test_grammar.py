"""Which values a checkpoint holds: all of them come back, and anything else is refused by path."""

from __future__ import annotations

import json
import math
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings

from fnaccel import tree
from fnaccel.checkpoint import checkpoints, restore, save
from fnaccel.checkpoint.format.dtypes import CODES
from fnaccel.checkpoint.format.values import decode, encode
from fnaccel.errors import CheckpointError, NotSerializableError
from fnaccel.state import Position, Seed, TrainState
from fnaccel.world.world import start
from tests.random_inputs import storable, tensors


@pytest.fixture(scope="module", autouse=True)
def world():
    with start(device="cpu") as found:
        yield found


def same(first, second):
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return type(first) is type(second) and (first == second)


def equal(first, second):
    pairs = zip(tree.leaves(first), tree.leaves(second), strict=True)
    return tree.structure(first) == tree.structure(second) and all(same(a, b) for a, b in pairs)


def there_and_back(value):
    made = encode(value)
    return decode(json.loads(json.dumps(made.structure, allow_nan=False)), made.tensors.__getitem__)


@given(value=storable)
def test_any_tree_comes_back(value):
    assert equal(there_and_back(value), value)


@settings(max_examples=30, deadline=None)
@given(value=storable)
def test_any_tree_comes_back_from_disk(tmp_path_factory, value):
    directory = tmp_path_factory.mktemp("tree")
    save(directory, {"value": value, "extras": None})
    assert equal(restore(directory, like={"value": value, "extras": None})["value"], value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 1e300, 2**80, True, 1, 1.0])
def test_numbers(value):
    found = there_and_back(value)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_states_and_keys():
    state = TrainState(
        step=3,
        updates=2,
        params={"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, "~": 1},
        buffers={},
        opt={},
        rng=Seed(7),
        data=Position(1, 5),
        extras=(b"\x00", ["", {}]),
    )
    assert sorted(encode(state).tensors) == ["params/a/b", "params/a~1b"]
    found = there_and_back(state)
    assert equal(found, state)
    assert found.data == Position(1, 5)


def test_every_dtype_from_disk(tmp_path):
    value = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in CODES}
    value |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(6.0).view(2, 3).T,
    }
    value["conjugated"] = torch.tensor([1 + 2j]).conj()
    save(tmp_path, value)
    found = restore(tmp_path, like=value)
    bits = lambda x: x.resolve_conj().contiguous().reshape(-1).view(torch.uint8)  # noqa: E731
    assert all(
        torch.equal(bits(found[key]), bits(value[key])) and found[key].dtype == value[key].dtype
        for key in value
    )
    assert all(found[key].data_ptr() != value[key].data_ptr() for key in value if value[key].numel())


def test_any_mapping_of_tensors_is_a_state_dict(tmp_path):
    value = torch.nn.BatchNorm1d(3).state_dict()
    save(tmp_path, value)
    found = restore(tmp_path, like=value)
    assert type(found) is OrderedDict
    assert equal(dict(found), dict(value))


def looped():
    made: list[object] = []
    made.append(made)
    return made


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [0, lambda: 0]}, "a/1 is a builtins.function"),
        ({"a": {(1,): 2}}, "a has the key (1,)"),
        (object(), "(the root) is a builtins.object"),
        ({"a": looped()}, "a/0 contains itself"),
        ({"a": "\ud800"}, "not Unicode"),
        ({"a": {1, 2}}, "a is a builtins.set"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, "a has dtype torch.complex128"),
        ({"a": torch.ones(1, device="meta")}, "a is on the meta device"),
        ({"a": torch.eye(2).to_sparse()}, "a is stored as torch.sparse_coo"),
        ({"__metadata__": torch.ones(1)}, "keeps for itself"),
    ],
)
def test_anything_else_is_refused_before_anything_is_written(tmp_path, value, words):
    with pytest.raises(NotSerializableError) as raised:
        save(tmp_path / "root", value)
    assert words in raised.value.what
    assert not (tmp_path / "root").exists()


def test_too_deep_is_refused():
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(NotSerializableError, match="too deep"):
        encode(value)


@pytest.mark.parametrize(
    "structure",
    [
        {},
        {"a": 1, "b": 2},
        {"dict": []},
        {"tuple": {}},
        {"float": "1"},
        {"bytes": "?"},
        {"object": {}},
        {"Seed": {"roots": 1}},
        {"TrainState": {"step": 0}},
        {"tensor": 1},
    ],
)
def test_foreign_structures_are_refused(structure):
    with pytest.raises(CheckpointError):
        decode(structure, lambda path: path)


def test_tied_tensors_stand_once(tmp_path):
    shared = torch.randn(3, 2)
    value = {"a": shared, "b": shared.view(3, 2), "part": shared[:1], "turned": shared.T}
    save(tmp_path, value)
    made = encode(value)
    assert list(made.tensors) == ["a", "part", "turned"]
    found = restore(tmp_path, like={**value, "b": shared})
    assert found["a"] is found["b"]
    assert equal(found, value)
    assert equal(restore(tmp_path, like={**value, "b": shared.clone()}), value)


@given(first=tensors(), second=tensors())
def test_equal_values_are_not_tied(first, second):
    assert len(encode([first, second, first.clone()]).tensors) == 3


def test_metadata_is_for_reading(tmp_path):
    path = save(tmp_path, {"x": 1}, metadata={"loss": 0.5})
    assert json.loads((path / "manifest.json").read_text())["metadata"] == {"dict": {"loss": 0.5}}
    with pytest.raises(NotSerializableError, match="metadata holds a tensor"):
        save(tmp_path, {"x": 1}, metadata=[torch.ones(1)])
    assert [one.step for one in checkpoints(tmp_path)] == [0]
