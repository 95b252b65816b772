"""The rows of `fa.Concat`, put together over batches and ranks: tensors of any width, or objects.

Tensors whose rows are equally wide need no message besides their rows if `compared` is False. All others are
described to the other ranks first, so that all of them pad to one width, or all of them raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist

from fnaccel.collectives import gather, gather_objects
from fnaccel.errors import LossError
from fnaccel.step.loss import Concat

Rows = torch.Tensor | list[Any]
"""The rows of one batch: a tensor `[rows, ...]`, or a list with one object for each row."""


def rows_of_concat(concat: Concat, where: str) -> Rows:
    """The rows that a `fa.Concat` holds.

    Raises:
        LossError: it holds no rows: a 0-d tensor, a string, a number.
    """
    value: Any = concat.value
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return value
    if isinstance(value, list | tuple):
        return list(cast("Sequence[Any]", value))
    shape = getattr(value, "shape", None)
    if not isinstance(value, torch.Tensor) and shape:  # an array of NumPy, whose strings torch can't hold
        return torch.as_tensor(value) if value.dtype.kind in "biufc" else value.tolist()
    kind = "a 0-d tensor" if shape is not None else type(value).__name__
    raise LossError(
        f"fa.Concat holds {kind}, which has no rows",
        where=where,
        fix="pass a tensor of shape [rows, ...], or a list with one object for each row",
    )


@attrs.frozen
class _Part:
    """The description of a rank's rows that ranks exchange.

    Attributes:
        counts: rows of each batch.
        shapes: the sizes of a row, in all batches. None if rows are objects.
        objects: the rows themselves, if they are objects.
    """

    counts: tuple[int, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    objects: tuple[Any, ...] = ()


def concatenated(
    parts: Sequence[Rows],
    pad: float | None,
    group: dist.ProcessGroup | None,
    *,
    where: str,
    by_batch: bool,
    compared: bool = True,
) -> Rows:
    """The rows of all batches of all ranks: a list if they are objects.

    Args:
        parts: this rank's rows, batch by batch. Every rank has the same number of batches.
        pad: the value that fills narrower rows. None if all must be equally wide.
        group: the process group. None for a single rank.
        where: the name of the caller, for messages.
        by_batch: whether the batches of all ranks are put side by side, in the order of the samples. Else
            ranks follow each other.
        compared: whether ranks compare the widths of their rows in any case.

    Raises:
        LossError: rows differ in width and there is no `pad`, or in their number of dimensions, or some are
            objects and others tensors. On every rank if `compared`.
    """
    objects = tuple(chain.from_iterable(part for part in parts if isinstance(part, list)))
    shapes = {None if isinstance(part, list) else tuple(part.shape[1:]) for part in parts}
    local = _Part(tuple(len(part) for part in parts), tuple(shapes), objects)
    plain = None not in shapes and len(shapes) == 1 and pad is None and not compared
    described = [local] if group is None or plain else gather_objects(local, over=group)
    shape = _common({shape for part in described for shape in part.shapes}, pad, where)
    counts = [part.counts for part in described]
    if shape is None:
        return _ordered([list(part.objects) for part in described], counts, by_batch)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    rows = torch.cat([_widened(part, shape, pad or 0) for part in tensors])
    if group is None:
        return rows
    everyone = gather(rows, over=group, valid=len(rows))
    if not by_batch:
        return everyone
    ranks = everyone.split([sum(each) for each in counts])
    by_rank = [rank.split(list(each)) for rank, each in zip(ranks, counts, strict=True)]
    return torch.cat([part for batch in zip(*by_rank, strict=True) for part in batch])


def _common(shapes: set[tuple[int, ...] | None], pad: float | None, where: str) -> tuple[int, ...] | None:
    """The sizes of a row that hold all rows. None if rows are objects."""
    sizes = [shape for shape in shapes if shape is not None]
    if None in shapes:
        if sizes:
            raise LossError(
                "fa.Concat holds a list in one batch and a tensor in another one",
                where=where,
                fix="return the same kind of rows for every batch, on every rank",
            )
        return None
    if len(sizes) == 1:
        return sizes[0]
    listed = " and ".join(str(list(shape)) for shape in sorted(sizes)[:4])
    if len({len(shape) for shape in sizes}) > 1:
        raise LossError(
            f"the rows of fa.Concat differ in their number of dimensions: {listed}",
            where=where,
            fix="return rows with the same number of dimensions for every batch",
        )
    if pad is None:
        raise LossError(
            f"the rows of fa.Concat differ in width: {listed}",
            where=where,
            fix="give a value that fills the narrower rows: fa.Concat(rows, pad=0)",
        )
    return tuple(max(axis) for axis in zip(*sizes, strict=True))


def _widened(rows: torch.Tensor, shape: tuple[int, ...], pad: float) -> torch.Tensor:
    if tuple(rows.shape[1:]) == shape:
        return rows
    wide = rows.new_full((rows.shape[0], *shape), pad)
    wide[(slice(None), *(slice(size) for size in rows.shape[1:]))] = rows
    return wide


def _ordered(ranks: list[list[Any]], counts: list[tuple[int, ...]], by_batch: bool) -> list[Any]:
    if not by_batch:
        return list(chain.from_iterable(ranks))
    left = [iter(rows) for rows in ranks]
    return [
        next(rows)
        for batch in zip(*counts, strict=True)
        for rows, count in zip(left, batch, strict=True)
        for _ in range(count)
    ]
