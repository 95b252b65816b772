"""Copies of batches that wait, for loaders that fill one buffer again and again: a ring, a memmap, a decoder.

A stream is read one batch ahead, a window collects batches, and a copy to an accelerator runs beside the
reading. A view of a buffer that the loader fills again would then hold the values of a later batch.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from fnaccel import tree
from fnaccel.tree import Tree


def makes_new_tensors(loader: object) -> bool:
    """Whether a loader collates rows into tensors, or takes them from workers, and so reuses no memory."""
    return isinstance(loader, DataLoader) and (loader.batch_sampler is not None or loader.num_workers > 0)


def copied(data: Tree) -> Tree:
    """A batch with the same values, whose lists, dicts, tensors and arrays are its own."""
    tree.learn(data)
    copies: dict[int, Any] = {}  # an object that stands in two places stays one
    leaves = tree.leaves(data)
    for leaf in leaves:
        if id(leaf) not in copies:
            copies[id(leaf)] = _copy(leaf)
    return _rebuilt(data, [copies[id(leaf)] for leaf in leaves])


def memory_of(data: Tree) -> set[int]:
    """The addresses of the storages of a batch's tensors."""
    addresses: set[int] = set()
    for leaf in tree.leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            with contextlib.suppress(RuntimeError):  # values that are nowhere
                addresses.add(leaf.untyped_storage().data_ptr())
    return addresses


def _copy(leaf: Tree) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (
            leaf.clone()
            if leaf.grad_fn is not None
            else leaf.detach().clone().requires_grad_(leaf.requires_grad)
        )
    is_array = hasattr(leaf, "__array_interface__") and hasattr(leaf, "strides")
    return leaf.copy() if is_array else leaf


def _rebuilt(data: Tree, leaves: list[Any]) -> Tree:
    """A batch with other leaves. Its class keeps what it holds beside them, as a tokenizer's output does."""
    built = tree.unflatten(tree.structure(data), leaves)
    entries = getattr(data, "__dict__", None)
    if entries is None or isinstance(data, torch.Tensor) or built is data:
        return built
    twin = copy.copy(data)
    try:
        if isinstance(data, Mapping):
            for key in data:
                twin[key] = built[key]
        elif dataclasses.is_dataclass(data):
            for field in dataclasses.fields(data):
                object.__setattr__(twin, field.name, getattr(built, field.name))
        else:
            return built
    except TypeError:  # a mapping that can't be changed
        return built
    return twin
