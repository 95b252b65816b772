"""The leaves of a batch that have a dimension of tokens, and this rank's part of each."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from fnaccel import tree
from fnaccel.errors import ArgumentError, MicroBatchError, nearest, require
from fnaccel.strategies.context.order import Chunks
from fnaccel.strategies.strategy import Pairs
from fnaccel.tree import Tree

_WHERE = "fa.context(cut=...)"
_KNOWN: Mapping[str, int | None] = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "position_ids": 1,
    "token_type_ids": 1,
    "labels": 1,
    "shift_labels": 1,
    "attention_mask": None,  # over keys: each rank needs those of all tokens
}
"""The dimension of tokens in the batches of transformers' models. None: every rank needs the leaf whole."""


def as_dims(cut: Mapping[Any, int | None] | Sequence[tuple[str, int | None]] | None) -> Pairs | None:
    """The argument `cut=` as a record keeps it.

    Raises:
        ArgumentError: no mapping of a leaf to a dimension.
    """
    if cut is None:
        return None
    pairs: Any = cut.items() if isinstance(cut, Mapping) else cut
    dims = Pairs((str(name), dim) for name, dim in pairs)
    require(
        bool(dims) and all(dim is None or (type(dim) is int and dim > 0) for _, dim in dims),
        f"cut={cut!r} does not say along which dimension a leaf of the batch has its tokens",
        "fa.context",
        'cut={"tokens": 1, "labels": 1}: dim 0 is the rows; None for a leaf that every rank needs whole',
    )
    return dims


@attrs.frozen
class Cut:
    """This rank's part of a batch.

    Attributes:
        data: the batch.
        lengths: how many tokens this rank has, for each length of sequence.
        uncut: the numbers of tokens of leaves that stay whole.
    """

    data: Any
    lengths: frozenset[int]
    uncut: frozenset[int]


def cut_leaves(batch: Tree, dims: Pairs | None, chunks: Chunks) -> Cut:
    """This rank's tokens of a batch.

    Args:
        batch: any pytree. The path of a leaf of a tuple is its index, and that of a batch that is a tensor is
            "".
        dims: the dimension of tokens by pattern of a leaf's path. The names of transformers' batches are
            known.
        chunks: which tokens are this rank's.

    Raises:
        MicroBatchError: a length does not divide, no leaf has tokens, or a leaf that is as long as one
            that is cut is not named.
        ArgumentError: a pattern of `cut=` fits no leaf.
    """
    tree.learn(batch)
    leaves, structure = tree.flatten(batch)
    paths = tree.paths(batch)
    choices = {path: _dim_of(path, leaf, dims) for path, leaf in zip(paths, leaves, strict=True)}
    for pattern, _ in dims or ():
        if not fnmatch.filter(paths, pattern):
            raise ArgumentError(
                f"{pattern!r} fits no leaf of the batch", where=_WHERE, fix=nearest(pattern, paths)
            )
    cut_dims = {path: dim for path, (dim, _) in choices.items() if dim is not None}
    if not cut_dims:
        listed = ", ".join(
            f"{path or 'the batch'}: {_shape(leaf)}" for path, leaf in zip(paths, leaves, strict=True)
        )
        raise MicroBatchError(
            f"no leaf of the batch is known to have tokens ({listed})",
            where=_WHERE,
            fix='name the dimension of tokens of each leaf: fa.context(2, cut={"tokens": 1, "labels": 1})',
        )
    sizes = {
        (cut_dims[path], _checked_length(path, leaf, cut_dims[path], chunks))
        for path, leaf in zip(paths, leaves, strict=True)
        if path in cut_dims
    }
    uncut: set[int] = set()
    parts: list[Any] = []
    for path, leaf in zip(paths, leaves, strict=True):
        dim, named = choices[path]
        if dim is None and isinstance(leaf, torch.Tensor):
            _check_unnamed(path, leaf, named, sizes)
            uncut.update(_lengths_of(path, leaf))
        parts.append(leaf if dim is None else chunks.cut(leaf, dim))
    lengths = frozenset(length // chunks.ranks for _, length in sizes)
    return Cut(tree.unflatten(structure, parts), lengths, frozenset(uncut))


def _lengths_of(path: str, leaf: torch.Tensor) -> Sequence[int]:
    """The numbers of tokens that a whole leaf may have: vectors of tokens, or their numbers."""
    if path.rpartition("/")[2] in _KNOWN:  # a mask over the tokens that are cut
        return ()
    if leaf.dim() > 2:
        return leaf.shape[1:-1]
    numbers = not leaf.is_floating_point() and leaf.dtype is not torch.bool
    return leaf.shape[1:] if numbers else ()


def _dim_of(path: str, leaf: Tree, dims: Pairs | None) -> tuple[int | None, bool]:
    """(the dimension of tokens of a leaf, or None; whether a pattern or a known name says so)."""
    for pattern, dim in dims or ():
        if fnmatch.fnmatchcase(path, pattern):
            if dim is not None and not (isinstance(leaf, torch.Tensor) and leaf.dim() > dim):
                raise MicroBatchError(
                    f"{path or 'the batch'} is {_shape(leaf)}, and has no dim {dim} to cut",
                    where=_WHERE,
                    fix="name tensors whose dim 0 is the rows, and a dimension that they have",
                )
            return dim, True
    name = path.rpartition("/")[2]
    if name in _KNOWN and isinstance(leaf, torch.Tensor):
        dim = _KNOWN[name]
        # labels of whole rows have no tokens
        return (dim, True) if dim is None or leaf.dim() > dim else (None, False)
    return None, False


def _checked_length(path: str, leaf: torch.Tensor, dim: int, chunks: Chunks) -> int:
    length = leaf.shape[dim]
    count = chunks.count
    if length % count or length < 2 * chunks.ranks:
        below, above = length // count * count, -(-max(length, 2 * chunks.ranks) // count) * count
        fits = " or ".join(str(size) for size in (below, above) if size >= 2 * chunks.ranks)
        raise MicroBatchError(
            f"{path or 'the batch'} has {length} tokens along dim {dim}, which {chunks.ranks} ranks can't "
            f"share in {count} equal chunks",
            where=_WHERE,
            fix=f"pad or cut rows to {fits} tokens"
            + (
                f"; or fa.context({chunks.ranks}, balance=False)"
                if chunks.balanced and not length % chunks.ranks
                else ""
            ),
        )
    return length


def _check_unnamed(path: str, leaf: torch.Tensor, named: bool, sizes: set[tuple[int, int]]) -> None:
    dims = [dim for dim in range(1, leaf.dim()) if (dim, leaf.shape[dim]) in sizes]
    if dims and not named:
        raise MicroBatchError(
            f"{path or 'the batch'} of shape {list(leaf.shape)} is as long as the leaves that are cut, and "
            "cut= does not name it",
            where=_WHERE,
            fix=f"cut={{{path!r}: {dims[0]}}} if it has one entry for each token; {{{path!r}: None}} if "
            "every rank needs all of it",
        )


def _shape(leaf: Tree) -> str:
    return f"of shape {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
