"""Metrics collected over batches and ranks, exact for any remainder: the inside of `evaluate`."""

from __future__ import annotations

import functools
import logging
import operator
from typing import Any

import torch
import torch.distributed as dist

from fnaccel.collectives.over import scope
from fnaccel.collectives.signature import Call, agree
from fnaccel.data import Batch
from fnaccel.data.batch_copies import copied, memory_of
from fnaccel.engine.aux_values import Accumulation, Rows, packed, unpacked
from fnaccel.errors import LoaderError
from fnaccel.step.loss import Concat, is_combinable, parts_of
from fnaccel.tree import Tree
from fnaccel.world.mesh import Mesh

_logger = logging.getLogger("fnaccel")


class Scores(Accumulation):
    """The results of a metric function: added up over batches, then over ranks."""

    __slots__ = ("_memory", "_mesh", "_rows", "_seen")
    name = "the result of the metric function"
    per = "batches"
    where = "fa.evaluate"

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(partial_rows=mesh.partial_rows)
        self._mesh = mesh
        self._memory: set[int] = set()
        self._seen = 0
        self._rows: set[int] = set()  # of batches with a bare scalar

    def take(self, metrics: Tree, batch: Batch) -> None:
        """Add one batch. A filler counts for nothing."""
        self._memory = memory_of(batch.data)
        self._seen += 1
        self.add(metrics, batch.valid)

    def rows(self, leaf: Concat) -> Rows:
        """Rows in memory of their own, since the loader may fill that of its batch again."""
        rows: Any = super().rows(leaf)
        if isinstance(rows, list):
            return [self._own(row) for row in rows]
        return self._own(rows)

    def _own(self, rows: Tree) -> Any:
        return copied(rows) if self._memory & memory_of(rows) else rows

    def pair(self, leaf: Tree, rows: int) -> tuple[Any, Any]:
        """Totals and weights in float64: bf16 would stop counting at 256."""
        self._rows.add(0 if is_combinable(leaf) else rows)
        if len(self._rows - {0}) > 1:
            _warn_of_bare(self.where)
        total, weight = parts_of(leaf, rows, self.where)
        return _wide(total), _wide(weight)

    def finish(self) -> Any:
        """The combined metrics, equal on all ranks.

        Raises:
            LoaderError: there was no batch.
            LossError: rows differ in width, and `fa.Concat` has no `pad`.
        """
        if self._structure is None:
            raise LoaderError("the data holds no batch", where=self.where, fix="give one item or more")
        group, world = self._mesh.group("loss"), self._mesh.world
        if self._pairs:
            sums = packed(self.values, world.device)
            if group is not None:
                # gloo aborts the process if an all-reduce meets one of another size, such as that of a step
                # ranks whose data sets differ have read other batches
                text = f"{len(sums)} sums of {self._seen} batches: {self.kinds} of {self._structure[1]}"
                agree(scope(group, world, "evaluate"), Call("evaluate", text))
                dist.all_reduce(sums, group=group)
            self.put(unpacked(sums, self.shapes))
        # rows in the order of the samples: batch by batch, and within a batch rank by rank
        return self.combined(operator.truediv, group, by_batch=True)


@functools.cache
def _warn_of_bare(where: str) -> None:
    """Once in a process."""
    _logger.warning(
        "%s got a bare scalar for batches of unequal rows, and averages it over rows. That is exact for a "
        "mean over rows, and not for a maximum or a mean over tokens: fa.Mean(total, weight=...), fa.Concat",
        where,
    )


def _wide(value: Tree) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)
