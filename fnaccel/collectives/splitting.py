"""`split_between_processes`: this rank's part of something that every rank has whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch

from fnaccel import tree
from fnaccel.collectives.over import Over, scope
from fnaccel.errors import ArgumentError
from fnaccel.tree import Tree
from fnaccel.world.world import World

T = TypeVar("T")


def split_between_processes(
    inputs: T, *, pad: bool = False, over: Over = None, world: World | None = None
) -> T:
    """This rank's part of `inputs`. Parts are consecutive, in rank order. Nothing is communicated.

    n items over W ranks give n // W each, and one more to the first n % W ranks. Slicing a tensor
    does not copy it.

    A tuple, a dict and a list of tensors with equally many rows are batches: each of their columns is
    split. Numbers and strings beside columns belong to the whole batch. Any other list is split item by
    item, and so is a tuple without columns in it, such as one of strings.

    Args:
        inputs: a list, a tensor `[n, ...]`, a `datasets.Dataset` (whatever has a length and `select`), or a
            tuple, dict or dataclass of such of one length.
        pad: give every rank ceil(n / W) items instead, repeating the last one at the end, so that the
            parts can be gathered. The first n gathered items are the inputs.
        over: the ranks that take part. By default all.
        world: the world, if none was started in this context.

    Raises:
        ArgumentError: the columns differ in length, `inputs` can't be cut, or a list of tensors in a batch
            may be columns as well as one tensor a row.

    Example, on 2 ranks:
        >>> prompts = ["a", "b", "c"]
        >>> fa.collectives.gather_objects(fa.split_between_processes(prompts))
        [['a', 'b'], ['c']]
        >>> x, y = fa.split_between_processes((torch.arange(3), torch.arange(3)))
        >>> fa.collectives.gather_objects(x.tolist())
        [[0, 1], [2]]
    """
    where = scope(over, world, "split_between_processes")
    tree.learn(inputs)
    length = _checked_length(inputs)
    if pad:
        share = -(-length // where.size)
        start, stop = where.rank * share, (where.rank + 1) * share
    else:
        share, extras = divmod(length, where.size)
        start = where.rank * share + min(where.rank, extras)
        stop = start + share + (where.rank < extras)
    return cast("T", _part(inputs, start, stop, length))


def _checked_length(inputs: Tree) -> int:
    lengths = _lengths(inputs, inner=False)
    if lengths:
        return lengths[0]
    if not isinstance(inputs, dict):
        kind = "a 0-d tensor" if isinstance(inputs, torch.Tensor) else type(inputs).__name__
        raise ArgumentError(
            f"{kind} can't be cut in parts",
            where="fa.split_between_processes",
            fix="pass a list, a tensor with a first dimension, or a tuple or dict of these",
        )
    return max(map(_checked_length, inputs.values()), default=0)  # which names what can't be cut


def _lengths(inputs: Tree, *, inner: bool = True) -> tuple[int, ...]:
    """How many rows inputs may have, the likely number first. None for what belongs to the whole batch.

    A list of tensors inside a batch may be columns, or one tensor a row: the other columns decide.
    """
    if _selects(inputs):
        return (len(inputs),)
    shape = getattr(inputs, "shape", None)
    if shape is not None:
        return (int(shape[0]),) if len(shape) else ()
    entries = _entries(inputs)
    if entries is None:
        return (len(inputs),) if isinstance(inputs, list | tuple) else ()
    counts = {name: lengths for name, child in entries.items() if (lengths := _lengths(child))}
    if not counts:
        return ()
    first, *others = counts.values()
    shared = tuple(n for n in first if all(n in lengths for lengths in others))
    if not shared:
        raise ArgumentError(
            "the values differ in length: "
            + ", ".join(f"{name!r} has {n}" for name, (n, *_) in counts.items()),
            where=f"fa.split_between_processes({type(inputs).__name__})",
            fix="pass values of one length; a list of other objects is split as a list",
        )
    if not (inner and isinstance(inputs, list)):
        return shared
    if shared[0] == len(inputs):
        raise ArgumentError(
            f"a list of {len(inputs)} tensors with {len(inputs)} rows each is one tensor a row, or columns",
            where="fa.split_between_processes",
            fix="for one tensor a row pass fa.data.Rows(list); for columns pass a dict",
        )
    return shared[0], len(inputs)


def _entries(inputs: Tree) -> dict[Any, Any] | None:
    """The columns of a batch by name. None for one column."""
    if isinstance(inputs, list):
        shapes = [getattr(item, "shape", None) for item in inputs]
        columns = {shape[0] if shape else None for shape in shapes}
        batch = type(inputs) is list and len(columns) == 1 and None not in columns
        return dict(enumerate(inputs)) if batch else None
    if isinstance(inputs, dict):
        return inputs
    if type(inputs) is tuple:
        return dict(enumerate(inputs)) if any(_lengths(item) for item in inputs) else None
    if isinstance(inputs, tuple | Mapping) or dataclasses.is_dataclass(inputs):
        opened = tree.open_node(inputs)
        return None if opened is None else opened[0]
    return None


def _part(inputs: Tree, start: int, stop: int, length: int) -> Any:
    entries = _entries(inputs)
    if entries is None or (isinstance(inputs, list) and _lengths(inputs, inner=False) != (length,)):
        return _rows(inputs, start, stop, length) if length in _column(inputs) else inputs
    parts = {name: _part(child, start, stop, length) for name, child in entries.items()}
    if isinstance(inputs, dict):
        return parts
    opened = None if type(inputs) in (list, tuple) else tree.open_node(inputs)
    return type(inputs)(parts.values()) if opened is None else opened[1](parts.values())


def _column(inputs: Tree) -> tuple[int, ...]:
    """The length of one column. Nothing for what belongs to the whole batch."""
    return (len(inputs),) if isinstance(inputs, list | tuple) else _lengths(inputs)


def _selects(inputs: Tree) -> bool:
    """Whether rows are taken by `select(indices)`, as of a `datasets.Dataset`."""
    return not isinstance(inputs, torch.Tensor) and callable(getattr(inputs, "select", None))


def _rows(column: Tree, start: int, stop: int, length: int) -> Any:
    missing = stop - max(start, length) if length else 0
    if _selects(column):
        return column.select([*range(min(start, length), min(stop, length)), *[length - 1] * missing])
    rows = column[start:stop]
    if missing <= 0:
        return type(column)(rows) if isinstance(column, list) else rows
    last = column[length - 1 : length]
    if isinstance(column, torch.Tensor):
        return torch.cat([rows, last.expand(missing, *column.shape[1:])])
    if hasattr(column, "shape"):  # an array
        return column[[*range(start, min(stop, length)), *[length - 1] * missing]]
    return type(column)([*rows, *last * missing])
