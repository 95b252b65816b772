"""Loaders that fill one buffer again and again, such as a ring, a memmap reader or a video decoder.

Here a batch waits while later ones are read: a window collects batches, a stream is read one batch ahead, a
copy to an accelerator runs beside the reading. A view of a buffer that the loader fills again would then hold
the values of a later batch. So a batch that waits gets memory of its own, unless the loader is seen not to
reuse any.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch

from fnaccel import _torch, tree
from fnaccel.errors import LoaderError
from fnaccel.tree import Tree

Spans = list[tuple[int, int]]
"""Address ranges, sorted, none of which overlap."""


@attrs.define
class _Reading:
    """A batch as the loader made it, as long as later batches are compared with it.

    The reference to `data` is what keeps the allocator from giving its memory to a later batch: else a loader
    that frees its batches would look like one that reuses them.

    Attributes:
        data: what the loader made.
        leaves: its leaves when it was read.
        spans: the memory of these.
        nodes: the ids of its lists and dicts.
        versions: how often PyTorch had written to each of its tensors.
        expires: the number of the first batch that it need not be compared with.
        given: what the training loop got: `data`, or a copy.
        owns: whether tensors and arrays of `given` are copies.
    """

    data: Tree
    leaves: list[Any]
    spans: Spans
    nodes: set[int]
    versions: list[int]
    expires: int
    given: Tree = None
    owns: bool = False


@attrs.define
class BufferGuard:
    """Copies batches while a loader may still reuse their memory.

    The first `depth` batches are copied. If no later batch within this depth has memory of theirs, copying
    stops, and batches are only compared by address from there on.

    Attributes:
        ahead: how many batches are read ahead of a window.
        depth: how many batches are read, at most, until a batch has been used.
    """

    ahead: int = 1
    depth: int = 1
    _number: int = 0
    _separate: int = 0  # batches in a row that shared no memory with those that wait
    _refills: bool = False  # whether a list or dict came again
    _doubt: bool = False  # whether memory came again and nobody knows if it was written to
    _waiting: deque[_Reading] = attrs.field(factory=deque[_Reading])

    def deepen(self, window: int, each: int = 1) -> None:
        """Let the next batches wait until a window of this many is complete.

        Args:
            window: batches that make one update.
            each: how many batches of the loader are read for one of them.
        """
        depth = (window + self.ahead) * each
        if depth > self.depth:  # batches that were read before wait no longer than their own depth
            self.depth, self._separate = depth, 0

    def own(self, batches: Iterable[Tree], *, keep: bool = False) -> Iterator[Tree]:
        """The batches of a loader, in memory that does not change until they are used.

        Args:
            batches: what the loader makes.
            keep: go on comparing in the next epoch, as windows go over its end.

        Raises:
            LoaderError: a loader that did not reuse memory begins to, and a batch is lost.
        """
        try:
            for data in batches:
                yield self._taken(data)
        finally:
            if not keep:
                self._waiting.clear()

    def _taken(self, data: Tree) -> Tree:
        self._number += 1
        while self._waiting and self._waiting[0].expires <= self._number:
            self._waiting.popleft()
        reading = _read(data, self._number + self.depth + 1)
        together = [old for old in self._waiting if _meet(old.spans, reading.spans)]
        nodes = [old for old in self._waiting if old.nodes & reading.nodes]
        if together or nodes:
            self._check(together, nodes)
        if together:
            self._separate = 0
        reading.owns = self._separate < self.depth
        self._refills = self._refills or bool(nodes)
        if reading.owns or self._refills:
            reading.given = copied(data) if reading.owns else _rebuilt(data, reading.leaves)
        if not together:
            self._separate += 1
            self._doubt = self._doubt and self._separate < self.depth
        self._waiting.append(reading)
        return reading.given

    def _check(self, together: list[_Reading], nodes: list[_Reading]) -> None:
        """Raise LoaderError if a batch that waits without a copy was written to.

        Memory that comes again need not be written to: a data set may hold its batches, and yield one twice.
        If PyTorch did not count a write, the copies that are made from here on show whether another library
        writes.
        """
        lost = any(old.given is old.data and _was_refilled(old) for old in nodes)
        for old in together:
            if not old.owns:
                lost = lost or old.versions != _versions(old.leaves)
                self._doubt = True
            elif self._doubt:
                lost = lost or not _equal(old.leaves, tree.leaves(old.given))
        if lost:
            raise LoaderError(
                f"batch {self._number} was written into the memory of a batch that waits, and the loader did "
                "not reuse any memory before",
                where="shard(loader)",
                fix="yield batches with memory of their own: batch.clone() in the loader or its collate_fn",
            )


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
    return leaf.copy() if _is_array(leaf) else leaf


def _is_array(leaf: Tree) -> bool:
    return hasattr(leaf, "__array_interface__") and hasattr(leaf, "strides")


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


def _read(data: Tree, expires: int) -> _Reading:
    tree.learn(data)
    leaves = tree.leaves(data)
    nodes: set[int] = set()
    _collect(data, nodes)
    spans = _merged([span for leaf in leaves for span in _spans(leaf)])
    return _Reading(data, leaves, spans, nodes, _versions(leaves), expires, data)


def _collect(node: Tree, ids: set[int]) -> None:
    """Add the ids of the lists and dicts in a batch."""
    kind = type(node)
    if kind is dict or kind is list:
        ids.add(id(node))
    elif kind is not tuple:
        if isinstance(node, Mapping):
            ids.add(id(node))
        return
    for child in node.values() if kind is dict else node:
        if not isinstance(child, torch.Tensor):
            _collect(child, ids)


def _spans(leaf: Tree) -> Spans:
    """The address range of each piece of memory of a leaf. Empty if it is unknown."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided:
            return [span for part in _parts(leaf) for span in _spans(part)]
        try:
            begin = leaf.data_ptr()
        except RuntimeError:  # values that are nowhere, such as those of a fake tensor
            return []
        if leaf.is_contiguous():
            return [(begin, begin + leaf.nbytes)] if begin else []
        shape, width = leaf.shape, leaf.element_size()
        strides = [stride * width for stride in leaf.stride()]
    elif _is_array(leaf):
        begin, shape, strides, width = (
            leaf.__array_interface__["data"][0],
            leaf.shape,
            leaf.strides,
            leaf.itemsize,
        )
    else:
        return []
    first = last = 0
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            return []
        reach = (size - 1) * stride
        first, last = (first, last + reach) if reach > 0 else (first + reach, last)
    return [(begin + first, begin + last + width)] if begin else []


def _parts(leaf: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The plain tensors of a jagged one. Other layouts are copied at first, and not compared."""
    return (leaf.values(), leaf.offsets()) if leaf.layout is torch.jagged else ()  # pyright: ignore[reportAttributeAccessIssue]


def _merged(spans: Spans) -> Spans:
    if len(spans) < 2:
        return spans
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _meet(first: Spans, second: Spans) -> bool:
    """Whether two lists of address ranges overlap anywhere."""
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i][1] <= second[j][0]:
            i += 1
        elif second[j][1] <= first[i][0]:
            j += 1
        else:
            return True
    return False


def _versions(leaves: list[Any]) -> list[int]:
    return [
        _torch.version_of(leaf)
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
    ]


def _was_refilled(reading: _Reading) -> bool:
    """Whether a list or dict of a batch holds other leaves than when it was read."""
    leaves = tree.leaves(reading.data)
    return len(leaves) != len(reading.leaves) or any(
        a is not b for a, b in zip(leaves, reading.leaves, strict=True)
    )


def _equal(leaves: list[Any], copies: list[Any]) -> bool:
    return all(_same(leaf, twin) for leaf, twin in zip(leaves, copies, strict=True))


def _same(leaf: Tree, twin: Tree) -> bool:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided:
            return True
        return bool(((leaf == twin) | ((leaf != leaf) & (twin != twin))).all())  # NaN is equal to itself here
    return leaf.tobytes() == twin.tobytes() if _is_array(leaf) else True
