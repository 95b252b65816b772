"""Cutting a batch along its rows, counting them, and putting parts together again.

Rows are dim 0 of every tensor (or array) leaf. A list without such tensors (of strings, numbers, dicts,
None) is a column too, with one entry a row. Scalars, strings and `Shared` lists belong to the whole batch:
each part gets them as they are. A list *of tensors* is a record of columns, as PyTorch's collate functions
make it. If it could as well be one tensor a row, it raises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from fnaccel import tree
from fnaccel.errors import ArgumentError, LoaderError, MicroBatchError, require
from fnaccel.texts import first_of
from fnaccel.tree import Tree


@attrs.frozen
class _Kind:
    """How batches of one class are counted, cut and joined."""

    rows: Callable[[Any], int | None]
    cut: Callable[[Any, int, int], Any]
    join: Callable[[list[Any]], Any] | None


_kinds: dict[type, _Kind] = {}


def register_batch(
    kind: type,
    *,
    cut: Callable[[Any, int, int], Any],
    rows: Callable[[Any], int | None] = len,
    join: Callable[[list[Any]], Any] | None = None,
) -> None:
    """Tell how batches of a class of yours are cut between ranks and in micro-batches.

    It holds for a whole batch of that class, or for a part of a batch, which then counts as one column.
    Tensors inside are moved to the device if the class is a pytree node, such as a dataclass or a mapping.

    Args:
        kind: the class. Its subclasses are not meant.
        cut: `(batch, start, stop) -> batch` with the rows from start to stop - 1.
        rows: `batch -> rows`. None belongs to the whole batch.
        join: `[batch, ...] -> batch`, needed for `remainder="wrap"` only.

    Raises:
        ArgumentError: no class, or no functions.

    Example:
        >>> class Sentences:
        ...     def __init__(self, lines): self.lines = lines
        >>> fa.data.register_batch(
        ...     Sentences,
        ...     rows=lambda batch: len(batch.lines),
        ...     cut=lambda batch, start, stop: Sentences(batch.lines[start:stop]),
        ... )
        >>> fa.data.rows_of(Sentences([torch.ones(3), torch.ones(5)]))
        2
    """
    require(
        isinstance(kind, type) and callable(cut) and callable(rows) and (join is None or callable(join)),
        f"{kind!r} is no class, or one of its functions is none",
        "fa.data.register_batch",
        "register_batch(MyBatch, cut=lambda batch, start, stop: batch[start:stop])",
    )
    _kinds[kind] = _Kind(rows, cut, join)


class Rows(list[Any]):
    """A list with one entry a row, such as tensors of different lengths. A collate function may return it.

    Example:
        >>> rows = fa.data.Rows([torch.ones(3), torch.ones(5), torch.ones(2)])
        >>> [len(part) for part in fa.data.cut(rows, [2, 1])]
        [2, 1]
    """


register_batch(
    Rows,
    cut=lambda batch, start, stop: Rows(batch[start:stop]),
    join=lambda parts: Rows(row for part in parts for row in part),
)
tree.register_sequence(Rows)


class Shared(list[Any]):
    """A list that all rows of a batch share: each rank and micro-batch gets it as it is.

    Example:
        >>> batch = {"x": torch.ones(4), "classes": fa.data.Shared(["cat", "dog"])}
        >>> [part["classes"] for part in fa.data.cut(batch, [2, 2])]
        [['cat', 'dog'], ['cat', 'dog']]
    """


register_batch(Shared, cut=lambda batch, start, stop: batch, rows=lambda batch: None)  # noqa: ARG005
tree.register_sequence(Shared)


def _is_column(node: Tree) -> bool:
    """Whether a node is a list with one value a row: none of its items has rows."""
    if type(node) in _kinds:
        return True
    if type(node) not in (list, tuple) or not node:
        return False
    if type(node) is tuple and not any(isinstance(item, list | tuple | Mapping) for item in node):
        return all(isinstance(item, str | bytes) for item in node)  # a tuple of numbers is a record
    return not any(type(item) not in _PLAIN and _holds_rows(item) for item in node)


_PLAIN = (str, bytes, int, float, bool)


def _holds_rows(item: Tree) -> bool:
    return _length(item) is not None or any(_holds_rows(child) for _, child in _children(item))


def _length(leaf: Tree) -> int | None:
    """Rows of a leaf. None for one that belongs to the whole batch."""
    kind = _kinds.get(type(leaf))
    if kind is not None:
        return kind.rows(leaf)
    if _is_column(leaf):
        return len(leaf)
    shape = getattr(leaf, "shape", None)
    return int(shape[0]) if isinstance(shape, Sequence) and len(shape) > 0 else None


class Columns:
    """The columns of a batch, found in one walk: what can be counted and cut along the rows.

    Args:
        batch: any pytree with at least one tensor (or column of plain values) in it.
        where: the name of the caller, for messages.
        per_sample: rows of each sample. Row `i` is of sample `i % samples`.

    Attributes:
        rows: how many rows the batch has. With several rows a sample, how many samples.

    Raises:
        LoaderError: the columns differ in length, there is none, or samples have other numbers of rows. Every
            path is listed.
    """

    def __init__(self, batch: Tree, where: str = "shard(loader)", per_sample: int = 1) -> None:
        self._batch = batch
        self._where = where
        self._lists: list[Any] = []
        self._leaves, self._structure = tree.flatten(batch, is_leaf=self._ends_at)
        while any(map(tree.is_container, self._leaves)):  # of a class that is walked from now on
            self._lists = []
            self._leaves, self._structure = tree.flatten(batch, is_leaf=self._ends_at)
        lengths = {length for leaf in self._leaves if (length := _length(leaf)) is not None}
        if len(lengths) != 1:
            raise self._uneven()
        (rows,) = lengths
        self.rows, rest = divmod(rows, per_sample)
        if rest:
            raise rows_differ(rows, per_sample)
        self._per_sample = per_sample
        if len(self._lists) > 1:
            self._check_lists_alone()

    def _ends_at(self, node: Tree) -> bool:
        """Whether a node is a column. Notes the lists and tuples that are none."""
        if isinstance(node, torch.Tensor) or type(node) is dict:
            return False
        if _is_column(node):
            return True
        if type(node) in (list, tuple) and (node is not self._batch or list in map(type, node)):
            self._lists.append(node)
        return False

    def _check_lists_alone(self) -> None:
        """Raise LoaderError if a batch is several lists of one length: pictures, and the boxes of each.

        Their items may have 3 channels and 3 boxes each. Nothing beside the lists says that 3 is no number
        of rows.
        """
        rows = self.rows * self._per_sample
        lists = [node for _, node in _inner_lists(self._batch, rows, ())]
        inside = [leaf for node in lists for leaf in tree.leaves(node, is_leaf=_is_column)]
        if len(lists) > 1 and len(set(map(len, lists))) == 1 and _counted(inside) == _counted(self._leaves):
            raise LoaderError(
                f"a batch of {len(lists)} lists of {len(lists[0])} items with {rows} entries each: "
                f"{len(lists[0])} rows, or columns of {rows}",
                where=self._where,
                fix="for one item a row pass each list as fa.data.Rows(list); for columns pass dicts",
            )

    def _uneven(self) -> LoaderError:
        sizes = {path: _length(leaf) for path, leaf in tree.items(self._batch, is_leaf=_is_column)}
        listed = ", ".join(f"{path or 'batch'}: {size}" for path, size in sizes.items() if size is not None)
        if not listed:
            return LoaderError(
                f"a batch holds no tensor to count rows of: {type(self._batch).__name__}",
                where=self._where,
                fix="yield tensors whose dim 0 is the batch (a collate_fn makes them), or fa.data.Rows(list)",
            )
        return LoaderError(
            f"the columns of a batch have different numbers of rows ({listed})",
            where=self._where,
            fix="give each tensor and list one entry a row, a list of tensors as fa.data.Rows(list). "
            "What belongs to the whole batch is a number, a string, a 0-d tensor or fa.data.Shared(list)",
        )

    def cut(self, sizes: Sequence[int]) -> list[Any]:
        """Consecutive parts of the batch. See `cut`."""
        if sum(sizes) != self.rows or min(sizes, default=0) < 0:
            raise MicroBatchError(
                f"a batch of {self.rows} rows can't be cut into parts of {list(sizes)}",
                where=self._where,
                fix=f"choose sizes that add up to {self.rows}: split_sizes({self.rows}, parts)",
            )
        if self._per_sample > 1:
            blocks = cut(self._batch, [self.rows] * self._per_sample, where=self._where)
            pieces = zip(*(cut(block, sizes, where=self._where) for block in blocks), strict=True)
            return [join(piece) for piece in pieces]
        if self._lists and max(sizes, default=0) < self.rows:
            _check_lists(self._batch, self.rows, self._where)
        parts = zip(*(_cut_leaf(leaf, sizes) for leaf in self._leaves), strict=True)
        return [tree.unflatten(self._structure, part) for part in parts]


def rows_differ(rows: int, per_sample: int, samples: int | None = None) -> LoaderError:
    """The error if a collate function did not make so many rows of each sample."""
    made = f" of {samples} samples" if samples else ""
    return LoaderError(
        f"a batch of {rows} rows{made} has not {per_sample} rows for each sample",
        where=f"fa.shard(loader, rows_per_sample={per_sample})",
        fix="pass how many rows the collate function makes of a sample; or fa.data.Rows, one entry a sample",
    )


def rows_of(batch: Tree, *, where: str = "shard(loader)") -> int:
    """How many rows a batch has: the size of dim 0, which all of its columns share.

    Args:
        batch: any pytree with at least one tensor (or column of plain values) in it.
        where: the name of the caller, for messages.

    Raises:
        LoaderError: the columns differ in length, or there is none. Every path is listed.

    Example:
        >>> fa.data.rows_of({"x": torch.ones(3, 2), "name": ["a", "b", "c"], "scale": 0.5})
        3
    """
    return Columns(batch, where).rows


def split_sizes(n: int, parts: int) -> list[int]:
    """Sizes of `parts` parts of `n` rows, as even as possible. The first parts get one more.

    Raises:
        ArgumentError: there is no part to cut into, or less than no row.

    Example:
        >>> split_sizes(7, 3)
        [3, 2, 2]
    """
    if parts < 1 or n < 0:
        raise ArgumentError(
            f"{n} rows can't be cut into {parts} parts",
            where="fnaccel.data.split_sizes",
            fix="ask for one part or more",
        )
    size, extra = divmod(n, parts)
    return [size + 1] * extra + [size] * (parts - extra)


def cut(batch: Tree, sizes: Sequence[int], *, where: str = "cut(batch, sizes)") -> list[Tree]:
    """Cut a batch into consecutive parts of the given numbers of rows. Tensors become views.

    Args:
        batch: any pytree whose columns have the same number of rows.
        sizes: rows of each part. 0 is allowed. `split_sizes(n, parts)` makes even parts.
        where: the name of the caller, for messages.

    Raises:
        LoaderError: the columns differ in length, or a list may be one entry a row as well as columns.
        MicroBatchError: the sizes don't add up to the rows of the batch.

    Example:
        >>> fa.data.cut({"x": torch.arange(5)}, [3, 2])[1]["x"].tolist()
        [3, 4]
    """
    return Columns(batch, where).cut(sizes)


_records: set[Any] = set()
"""Structures of batches whose inner lists are columns: there were batches of another number of rows."""


def _check_lists(batch: tree.Tree, rows: int, where: str) -> None:
    """Raise LoaderError for an inner list as long as the batch, if its items have as many rows as well.

    It may be one item a row, such as the boxes of each picture, or columns, as collate functions make them of
    samples with a tuple inside. A batch of another number of rows settles it: then only columns fit.
    """
    lists = list(_inner_lists(batch, rows, ()))
    if not lists:
        return
    structure = tree.structure(batch, is_leaf=_is_column)
    doubtful = [(path, node) for path, node in lists if len(node) == rows]
    if not doubtful:
        _records.add(structure)
    elif structure not in _records:
        path, node = doubtful[0]
        name = tree.join(path) or "the batch"
        raise LoaderError(
            f"{name} is a {type(node).__name__} of {rows} items with {rows} entries each, in a batch of "
            f"{rows} rows: one item a row, or columns",
            where=where,
            fix=f"for one item a row pass fa.data.Rows({name}); for columns pass a dict or one tensor",
        )


def _inner_lists(node: Tree, rows: int, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The lists and tuples in a batch whose items are all columns, with their paths.

    A whole batch that is a list of tensors is one of columns, as PyTorch's collate function makes it.
    """
    kind = type(node)
    if kind in (list, tuple) and not _is_column(node):
        columns = (list,) if not path else (list, dict, torch.Tensor)
        if all(_is_entry(item, columns, rows) for item in node):
            yield path, node
            return
    for key, child in _children(node):
        yield from _inner_lists(child, rows, (*path, key))


def _children(node: Tree) -> Iterable[tuple[Any, Any]]:
    """The entries of a node that is no column, by name."""
    if isinstance(node, torch.Tensor) or _is_column(node):
        return ()
    if type(node) in (list, tuple):
        return enumerate(node)
    if isinstance(node, Mapping | tuple) or dataclasses.is_dataclass(node):
        opened = tree.open_node(node)
        return () if opened is None else opened[0].items()
    return ()


def _is_entry(item: Tree, kinds: tuple[type, ...], rows: int) -> bool:
    """Whether an item is of one of the kinds, and all its columns have that many rows."""
    if not (isinstance(item, kinds) or (torch.Tensor in kinds and hasattr(item, "__array_interface__"))):
        return False
    if kinds == (list,) and not _is_column(item):
        return False
    return {_length(leaf) for leaf in tree.leaves(item, is_leaf=_is_column)} == {rows}


def _counted(leaves: Iterable[Tree]) -> int:
    return sum(_length(leaf) is not None for leaf in leaves)


def _cut_leaf(leaf: Tree, sizes: Sequence[int]) -> Sequence[Any]:
    if _length(leaf) is None:
        return [leaf] * len(sizes)
    if isinstance(leaf, torch.Tensor):
        return _cut_nested(leaf, sizes) if leaf.is_nested else leaf.split(list(sizes))
    kind = _kinds.get(type(leaf))
    cuts: list[Any] = []
    first = 0
    for size in sizes:
        stop = first + size
        cuts.append(leaf[first:stop] if kind is None else kind.cut(leaf, first, stop))
        first = stop
    return cuts


def _cut_nested(leaf: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Parts of a nested tensor, whose rows have different lengths. They are copies.

    Raises:
        MicroBatchError: a part without rows, which has no lengths.
    """
    if 0 in sizes:
        raise MicroBatchError(
            f"a nested tensor of {sum(sizes)} rows can't be cut into parts of {list(sizes)}",
            where="cut(batch, sizes)",
            fix="give one row or more to each rank and micro-batch; or pass fa.data.Rows(tensor.unbind())",
        )
    rows = iter(leaf.unbind())
    parts = ([next(rows) for _ in range(size)] for size in sizes)
    return [torch.nested.as_nested_tensor(part, layout=leaf.layout) for part in parts]


def join(parts: Sequence[tree.Tree]) -> tree.Tree:
    """The inverse of `cut`: tensors concatenated along dim 0, columns appended, the rest of the first.

    Example:
        >>> join([{"x": torch.ones(2)}, {"x": torch.ones(1)}])
        {'x': tensor([1., 1., 1.])}
    """
    return tree.map(lambda *leaves: _join_leaves(leaves), *parts, is_leaf=_is_column)


def _join_leaves(leaves: tuple[Any, ...]) -> Any:
    first = leaves[0]
    if _length(first) is None:
        return first
    kind = _kinds.get(type(first))
    if kind is not None:
        if kind.join is None:
            name = type(first).__name__
            raise LoaderError(
                f"remainder='wrap' joins batches of {name}, and nothing says how",
                where="shard(loader)",
                fix=f"fa.data.register_batch({name}, ..., join=...), or another remainder",
            )
        return kind.join(list(leaves))
    if isinstance(first, torch.Tensor):
        if first.is_nested:
            rows = [row for leaf in leaves for row in leaf.unbind()]
            return torch.nested.as_nested_tensor(rows, layout=first.layout)
        return torch.cat(leaves)
    if _is_column(first):
        return type(first)(item for leaf in leaves for item in leaf)
    return torch.cat([torch.as_tensor(leaf) for leaf in leaves]).numpy()


def shapes_of(batch: Tree) -> str:
    """The kinds, dtypes and shapes of a batch's leaves, by path."""
    try:
        leaves = [
            f"{path or '(root)'}: {type(x).__name__}"
            + (f" {x.dtype} {list(x.shape)}" if hasattr(x, "shape") else "")
            for path, x in tree.items(batch)
        ]
    except Exception:  # any object of the user's may be a batch
        return f"a {type(batch).__name__}"
    return first_of(leaves) or f"a {type(batch).__name__}"
