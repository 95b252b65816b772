"""The micro-batches of one update: a batch, or each batch of a window, cut along its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from fnaccel import tree
from fnaccel.data.batch import Batch, Window
from fnaccel.data.cut import cut, rows_of, split_sizes
from fnaccel.errors import MicroBatchError
from fnaccel.tree import Tree

_NOTHING = contextlib.nullcontext()


@attrs.frozen
class MicroBatch:
    """One micro-batch of this rank. `valid` 0 marks a filler."""

    data: Any
    valid: int


@attrs.define
class MicroBatches:
    """The micro-batches of one update on this rank, in order.

    Attributes:
        parts: the micro-batches.
        batch: the last `fa.data.Batch`, which knows its position in the data. None for plain batches.
        around: the context of their forward and backward passes.
    """

    parts: list[MicroBatch]
    batch: Batch | None = None
    around: contextlib.AbstractContextManager[Any] = _NOTHING

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.parts)

    def __getitem__(self, index: int) -> MicroBatch:
        return self.parts[index]


def micro_batches(batch: Tree, n: int, device: torch.device) -> MicroBatches:
    """Cut a batch, or each batch of a window, in `n` micro-batches (0 and 1: as it is).

    Args:
        batch: a pytree of rows, a `Batch`, or a `Window` of either.
        n: how many micro-batches each of them makes.
        device: rows of a plain batch are moved there.

    Raises:
        MicroBatchError: fewer rows than `n`, or an empty window.
    """
    if not isinstance(batch, Window):
        return MicroBatches(_cut(batch, n, device), batch if isinstance(batch, Batch) else None)
    if not batch:
        raise MicroBatchError(
            "the window holds 0 batches", where="train_step(state, window)", fix="give one batch or more"
        )
    parts = [part for member in batch for part in _cut(member, n, device)]
    last = batch[-1]
    return MicroBatches(parts, last if isinstance(last, Batch) else None)


def _cut(batch: Tree, n: int, device: torch.device) -> list[MicroBatch]:
    if isinstance(batch, Batch):
        data, valid = batch.data, batch.valid
    else:
        data, valid = batch, 1
        if device.type != "cpu":
            tree.learn(data)
            data = tree.to(data, device)
    if n <= 1:
        return [MicroBatch(data, valid)]
    rows = rows_of(data)
    full = batch.rows if isinstance(batch, Batch) else rows
    if full < n:
        raise MicroBatchError(
            f"a batch of {full} rows on this rank can't be cut in {n} micro-batches",
            where=f"accumulate(step, {n})",
            fix=f"give at least {n} rows a rank, or fewer micro-batches",
        )
    sizes = [size for size in split_sizes(rows, n) if size]
    parts = [MicroBatch(part, valid and size) for part, size in zip(cut(data, sizes), sizes, strict=True)]
    # the remainder of an epoch may have fewer rows than micro-batches: the rest are fillers
    fillers = n - len(parts)
    return parts + [MicroBatch(cut(data, [1, rows - 1])[0], 0)] * fillers if fillers else parts
