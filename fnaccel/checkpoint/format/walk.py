"""The nodes of a tree in a checkpoint: what they are, their entries, and nodes made of new entries.

Trees in memory and decoded trees are walked alike. A decoded tree has `Stored` in the place of a tensor.
"""

from __future__ import annotations

import sys
from typing import Any

import attrs
import torch

from fnaccel import tree
from fnaccel.checkpoint.format.manifest import Stored
from fnaccel.state import Position, Seed, TrainState

NODES: dict[str, type[Any]] = {"TrainState": TrainState, "Position": Position, "Seed": Seed}
"""The classes of the library that a checkpoint may hold."""


@attrs.frozen
class Array:
    """A stored NumPy array: the tensor that holds its values."""

    tensor: Any


@attrs.frozen
class Node:
    """A stored pytree node of a class that reading does not build: its entries by name."""

    entries: dict[str, Any]


@attrs.frozen
class Object:
    """A stored object: the result of its `state_dict()`."""

    state: Any


_LEAVES = (type(None), bool, int, float, str, bytes, torch.Tensor, Stored, Array, Object)


def child(path: str, key: str | int) -> str:
    """The path of one entry of the node at `path` (the root is `""`)."""
    escaped = str(key).replace("~", "~0").replace("/", "~1")
    return f"{path}/{escaped}" if path else escaped


def shown(path: str) -> str:
    """A path as messages print it."""
    return path or "(the root)"


def fields_of(node: tree.Tree) -> list[str]:
    """The fields of a node of the library that a checkpoint keeps."""
    return [field.name for field in attrs.fields(type(node)) if field.init]


def entries_of(value: tree.Tree) -> dict[Any, Any] | None:
    """The children of a node by key, or None for a leaf. For trees in memory and decoded trees."""
    if isinstance(value, _LEAVES) or is_object(value):
        return None
    if isinstance(value, dict):
        return value
    if type(value) in (list, tuple):
        return dict(enumerate(value))
    if type(value) in NODES.values():
        return {name: getattr(value, name) for name in fields_of(value)}
    if isinstance(value, Node):
        return value.entries
    node = opened(value)
    return None if node is None else node[0]


def opened(value: tree.Tree) -> Any:
    """As `tree.open_node`. Dataclasses and attrs classes are nodes, too."""
    node = tree.open_node(value)
    return tree.open_node(value) if node is None and tree.learn_record(value) else node


def rebuilt(value: tree.Tree, entries: dict[Any, Any]) -> Any:
    """A node of the class of `value` with these entries. A `Node` if reading does not build that class."""
    if isinstance(value, dict):
        return entries
    if type(value) in (list, tuple):
        return type(value)(entries.values())
    return type(value)(**entries) if type(value) in NODES.values() else Node(entries)


def is_object(value: tree.Tree) -> bool:
    """Whether a value keeps a state of its own, which it gives out and takes back."""
    return not isinstance(value, type | torch.Tensor) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def is_array(value: tree.Tree) -> bool:
    """Whether a value is a NumPy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray
