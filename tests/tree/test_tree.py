"""The pytree functions (law 10: structure is kept, non-tensors are left alone)."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass

import attrs
import pytest
import torch
from hypothesis import given

from fnaccel import tree
from tests.random_inputs import mixed_trees


@attrs.frozen
class Node:
    value: object
    tag: str = "tag"


tree.register(Node, children=("value",))


def same(first, second):
    """Equal structures, and equal leaves, tensors by value and dtype."""
    pairs = zip(tree.leaves(first), tree.leaves(second), strict=True)
    return tree.structure(first) == tree.structure(second) and all(
        a.dtype == b.dtype and torch.equal(a, b)
        if isinstance(a, torch.Tensor)
        else a == b and type(a) is type(b)
        for a, b in pairs
    )


@given(value=mixed_trees)
def test_structure_is_kept(value):
    expected = tree.structure(value)
    for changed in (
        tree.map(lambda leaf: leaf, value),
        tree.map_tensors(lambda x: x + 1 if x.dtype != torch.bool else ~x, value),
        tree.map_with_path(lambda _, leaf: leaf, value),
        tree.cast(value, torch.float64),
        tree.to(value, "cpu"),
    ):
        assert tree.structure(changed) == expected


@given(value=mixed_trees)
def test_non_tensors_are_left_alone(value):
    changed = tree.map_tensors(torch.zeros_like, tree.cast(value, torch.float64))
    for before, after in zip(tree.leaves(value), tree.leaves(changed), strict=True):
        if isinstance(before, torch.Tensor):
            assert after.dtype == (torch.float64 if before.is_floating_point() else before.dtype)
            assert not after.any()
        else:
            assert after is before


@given(value=mixed_trees)
def test_flatten_and_unflatten(value):
    leaves, structure = tree.flatten(value)
    assert same(tree.unflatten(structure, leaves), value)
    assert tree.structure(value) == structure
    assert [path for path, _ in tree.items(value)] == tree.paths(value)
    assert len(set(tree.paths(value))) == len(leaves)


@given(value=mixed_trees)
def test_partition_and_combine(value):
    tensors, others = tree.partition(lambda leaf: isinstance(leaf, torch.Tensor), value)
    assert all(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(tensors))
    assert not any(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(others))
    assert same(tree.combine(tensors, others), value)


@given(value=mixed_trees)
def test_a_tree_is_close_to_itself(value):
    assert tree.allclose(value, value)


def test_allclose_sees_structure_shape_value_and_objects():
    one = {"a": torch.ones(2), "b": 1}
    assert not tree.allclose(one, {"a": torch.ones(2)})
    assert not tree.allclose(one, {"a": torch.ones(2, 1), "b": 1})
    assert not tree.allclose(one, {"a": torch.ones(2) + 1e-3, "b": 1})
    assert not tree.allclose(one, {"a": torch.ones(2), "b": 2})
    assert tree.allclose(one, {"a": torch.ones(2) + 1e-3, "b": 1}, atol=1e-2)


def test_dicts_are_walked_by_sorted_key():
    assert tree.paths({"b": 1, "a": {"d": 2, "c": [3, 4]}}) == ["a/c/0", "a/c/1", "a/d", "b"]
    assert tree.leaves({"b": 1, "a": 2}) == tree.leaves({"a": 2, "b": 1}) == [2, 1]


def test_registered_classes_show_their_children_only():
    node = {"n": Node(torch.ones(2), "kept")}
    assert tree.paths(node) == ["n/value"]
    doubled = tree.map_tensors(lambda x: x * 2, node)
    assert (doubled["n"].value.tolist(), doubled["n"].tag) == ([2.0, 2.0], "kept")
    assert tree.structure(node) != tree.structure({"n": Node(torch.ones(2), "other")})


def test_select():
    value = {"params": {"weight": 1, "bias": 2}, "opt": {"bias": 3}}
    assert tree.select(value, "params/*") == {"params/bias": 2, "params/weight": 1}
    assert tree.select(value, ["*/bias", "opt/*"]) == {"opt/bias": 3, "params/bias": 2}


def test_mappings_and_dataclasses_are_learned_as_batches():
    import collections
    import dataclasses

    from fnaccel.data import cut, rows_of

    class Encoding(collections.UserDict):
        """What a tokenizer returns."""

    @dataclasses.dataclass
    class Pair:
        x: torch.Tensor
        y: torch.Tensor

    x, y = torch.arange(6).view(3, 2), torch.arange(3)
    for batch in (Encoding(x=x, y=y), Pair(x, y)):
        assert rows_of(batch) == 3
        first, second = cut(batch, [2, 1])
        assert type(first) is type(batch)
        assert (
            second["x"].tolist() == [[4, 5]]
            if isinstance(second, Encoding)
            else second.x.tolist() == [[4, 5]]
        )
        assert tree.map_tensors(lambda t: t + 1, batch) is not batch
    learned = tree.map_tensors(lambda t: t * 2, Encoding(y=y, x=x))
    assert learned["y"].tolist() == [0, 2, 4]


@attrs.define(eq=False)
class Moves:
    """An object with a `to` of its own, which is no container."""

    where: str = "cpu"

    def to(self, device):
        return Moves(str(device))


class Opaque:
    def __init__(self):
        self.table = torch.ones(2)


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (lambda batch: tree.to(batch, "meta"), lambda x: x.is_meta),
        (lambda batch: tree.cast(batch, torch.float16), lambda x: x.dtype is torch.float16),
        (lambda batch: tree.map_tensors(lambda x: x + 1, batch), lambda x: bool((x == 2).all())),
    ],
    ids=["to", "cast", "map_tensors"],
)
def test_containers_are_walked_on_sight(change, changed):
    """At any depth, also the second one of a class in the same tree."""

    class Mapped(UserDict):
        """A class that nothing has seen."""

    @dataclass
    class Pair:
        first: object
        second: object

    x = torch.ones(2)
    found = change([Mapped(a=x), {"b": Mapped(a=Pair(x, Mapped(c=x)))}, (Pair(x, "text"),)])
    assert [type(found[0]), type(found[1]["b"]["a"]), type(found[2][0])] == [Mapped, Pair, Pair]
    pair = found[1]["b"]["a"]
    assert all(changed(x) for x in (found[0]["a"], pair.first, pair.second["c"], found[2][0].first))
    assert found[2][0].second == "text"


def test_objects_move_themselves_and_modules_stay():
    linear = torch.nn.Linear(2, 1)
    moved, kept, kind = tree.to([Moves(), linear, Moves], "meta")
    assert moved.where == "meta"
    assert kept is linear
    assert not linear.weight.is_meta
    assert kind is Moves


def test_an_object_that_holds_tensors_is_named_once(monkeypatch):
    monkeypatch.setattr("fnaccel.tree.trees._told", set())
    with pytest.warns(UserWarning, match=r"Opaque holds tensors \(table\) and is no container"):
        tree.cast([Opaque(), Opaque()], torch.float16)
    tree.to(Opaque(), "meta")


def test_learning_says_whether_there_are_more_leaves():
    class Mapped(UserDict):
        """A class that nothing has seen."""

    batch = {"a": Mapped(b=Mapped(c=1))}
    assert tree.learn(batch)
    assert tree.leaves(batch) == [1]
    assert not tree.learn(batch)


DIFFERING = {
    "a key that is missing": ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, "a/c is missing"),
    "a key that is unknown": ({"a": {"b": 1}}, {"a": {"b": 1, "x": 2}}, "a/x is unknown"),
    "a longer list": ({"a": [1]}, {"a": [1, 2]}, "a/1 is unknown"),
    "a tuple": ({"a": [{"b": [1]}]}, {"a": [{"b": (1,)}]}, "a/0/b is tuple, not list"),
    "a leaf": ({"a": {"b": 1}}, {"a": 1}, "a is int, not dict"),
    "a value in the place of None": ({"a": {"b": None}}, {"a": {"b": 1}}, "a/b is int, not NoneType"),
    "the root": ([1], {"a": 1}, r"\(the root\) is dict, not list"),
}


@pytest.mark.parametrize(("first", "other", "message"), DIFFERING.values(), ids=DIFFERING)
@pytest.mark.parametrize("mapped", [tree.map, tree.map_with_path])
def test_trees_that_differ_are_told_by_path(mapped, first, other, message):
    with pytest.raises(ValueError, match=f"tree 2 differs from tree 0: {message}"):
        mapped(lambda *leaves: leaves, first, first, other)


def test_a_value_error_of_the_function_is_left_alone():
    def fn(first, second):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        tree.map(fn, {"a": 1}, {"a": 2})


def test_parts_that_differ_are_told_by_path():
    with pytest.raises(ValueError, match="tree 1 differs from tree 0: a/b is missing"):
        tree.combine({"a": {"b": None}}, {"a": {}})


def cell(*values, dtype=None):
    return {"a": torch.tensor(values, dtype=dtype)}


NUMBERS = {
    "lerp of ints": (lambda: tree.lerp(cell(0, 10), cell(4, 21), 0.5)["a"], torch.tensor([2.0, 15.5])),
    "lerp of bools": (lambda: tree.lerp(cell(False), cell(True), 0.25)["a"], torch.tensor([0.25])),
    "lerp of bf16 and fp32": (
        lambda: tree.lerp(cell(0.0, dtype=torch.bfloat16), cell(1.0), torch.tensor(0.3))["a"],
        torch.tensor([0.3]),
    ),
    "lerp of an int and fp64": (
        lambda: tree.lerp(cell(1), cell(2.0, dtype=torch.float64), 0.5)["a"],
        torch.tensor([1.5], dtype=torch.float64),
    ),
    "norm of bools": (lambda: tree.norm(cell(True, False, True, True, True)), torch.tensor(2.0)),
    "norm of int8": (lambda: tree.norm(cell(-128, 96, dtype=torch.int8)), torch.tensor(160.0)),
    "norm of large ints": (lambda: tree.norm(cell(2**33)), torch.tensor(2.0**33)),
    "norm of ints and floats": (
        lambda: tree.norm({"a": torch.tensor([3.0]), "b": torch.tensor([4])}),
        torch.tensor(5.0),
    ),
    "norm of 1e-23 in fp64": (
        lambda: tree.norm(cell(3e-23, 4e-23, dtype=torch.float64)),
        torch.tensor(5e-23, dtype=torch.float64),
    ),
    "dot of int8": (
        lambda: tree.dot(cell(100, dtype=torch.int8), cell(100, dtype=torch.int8)),
        torch.tensor(10000),
    ),
    "dot of complex and real": (
        lambda: tree.dot(*[{"a": torch.tensor([1 + x * 1j]), "b": torch.ones(2)} for x in (1, 2)]),
        torch.tensor(5 + 1j),
    ),
}


@pytest.mark.parametrize(("value", "expected"), NUMBERS.values(), ids=NUMBERS)
def test_arithmetic_of_dtypes_is_that_of_numpy_and_jax(value, expected):
    torch.testing.assert_close(value(), expected)


@pytest.mark.parametrize("first", [torch.ones(2), torch.arange(2)], ids=["floats", "ints"])
def test_arithmetic_of_two_dtypes_is_one_graph(first):
    def mixed(one, other):
        between = tree.lerp(one, other, 0.5)
        return between["a"], tree.norm(one), tree.dot(one, other)

    trees = {"a": first}, {"a": torch.ones(2, dtype=torch.bfloat16)}
    graph = torch.compile(mixed, fullgraph=True, backend="eager")
    torch.testing.assert_close(graph(*trees), mixed(*trees))
