"""The micro-batches of one update: a batch, or each batch of a window, cut along its rows."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
import torch

from fnaccel import tree
from fnaccel.data.batch import Batch, Window, made_of
from fnaccel.data.cut import Columns, rows_differ, split_sizes
from fnaccel.errors import MicroBatchError
from fnaccel.tree import Tree


@attrs.frozen
class MicroBatch:
    """One micro-batch of this rank.

    Attributes:
        data: its rows.
        valid: how many of them count. 0 marks a filler.
        first: the place of its first row in the global batch of the update. None if that is not known.
    """

    data: Any
    valid: int
    first: int | None = None


class MicroBatches(list[MicroBatch]):
    """The micro-batches of one update on this rank, in order.

    Attributes:
        batch: the last `fa.data.Batch`, which knows its position in the data. None for plain batches.
        around: the context of their forward and backward passes.
        note: a warning of rows that were cut, though they are no samples. None without.
    """

    batch: Batch | None = None
    note: str | None = None
    around: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def micro_batches(batch: Tree, n: int, device: torch.device) -> MicroBatches:
    """Cut a batch, or each batch of a window, in `n` micro-batches (0 and 1: as it is).

    Args:
        batch: a pytree of rows, a `Batch`, or a `Window` of either.
        n: how many micro-batches each of them makes.
        device: rows of a plain batch are moved there.

    Raises:
        MicroBatchError: fewer rows than `n`, or an empty window.
    """
    members = batch if isinstance(batch, Window) else (batch,)
    if not members:
        raise MicroBatchError(
            "the window holds 0 batches", where="train_step(state, window)", fix="give one batch or more"
        )
    parts, before = MicroBatches(), 0
    for member in members:
        parts += _cut(member, n, device, before, parts)
        before += member.together if isinstance(member, Batch) else 0
    if isinstance(members[-1], Batch):
        parts.batch = members[-1]
    return parts


def _cut(batch: Tree, n: int, device: torch.device, before: int, noted: MicroBatches) -> list[MicroBatch]:
    """The micro-batches of one batch of a window, after `before` rows of the other batches."""
    per_sample, samples = 1, None
    if isinstance(batch, Batch):
        data, valid = batch.data, batch.valid
        first = None if batch.first is None else before + batch.first
        per_sample, samples = batch.per_sample, batch.samples
    else:
        data, valid, first = batch, 1, None
        if device.type != "cpu":
            tree.learn(data)
            data = tree.to(data, device)
    if n <= 1:
        return [MicroBatch(data, valid, first)]
    columns = Columns(data, f"accumulate(step, {n})", per_sample)
    if samples and samples != columns.rows:
        if per_sample > 1:
            raise rows_differ(columns.rows * per_sample, per_sample, samples)
        noted.note = made_of(columns.rows, samples, f"accumulate(step, {n})")
    full = batch.rows if isinstance(batch, Batch) else columns.rows
    if full < n:
        raise MicroBatchError(
            f"a batch of {full} rows on this rank can't be cut in {n} micro-batches",
            where=f"accumulate(step, {n})",
            fix=f"give at least {n} rows a rank, or fewer micro-batches",
        )
    sizes = [size for size in split_sizes(columns.rows, n) if size]
    pairs = zip(columns.cut(sizes), sizes, strict=True)
    parts: list[MicroBatch] = []
    for part, size in pairs:
        parts.append(MicroBatch(part, valid and size, first))
        first = None if first is None else first + size
    # the remainder of an epoch may have fewer rows than micro-batches: the rest are fillers
    fillers = n - len(parts)
    filler = MicroBatch(columns.cut([1, columns.rows - 1])[0], 0, first) if fillers else None
    return parts if filler is None else parts + [filler] * fillers
