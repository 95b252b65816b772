"""Metrics collected over batches and ranks, exact for any remainder: the inside of `evaluate`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fnaccel import tree
from fnaccel.collectives.over import scope
from fnaccel.collectives.signature import Call, agree
from fnaccel.data import Batch
from fnaccel.engine.rows import Rows, concatenated, rows_of_concat
from fnaccel.errors import LoaderError, LossError
from fnaccel.step.loss import Concat, Sum, is_combinable, parts_of
from fnaccel.tree import Tree
from fnaccel.world.mesh import Mesh


class Scores:
    """Totals, weights and rows of each leaf that a metric function returns."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._structure: Any = None
        self._kinds: list[type] = []
        self._totals: list[Any] = []
        self._weights: list[Any] = []
        self._pads: list[float | None] = []
        self._rows: list[list[Rows]] = []

    def take(self, metrics: Tree, batch: Batch) -> None:
        """Add one batch. A filler counts for nothing."""
        leaves, structure = tree.flatten(metrics, is_leaf=is_combinable)
        if self._structure is None:
            self._structure = structure
            self._kinds = [type(leaf) for leaf in leaves]
            self._pads = [leaf.pad if isinstance(leaf, Concat) else None for leaf in leaves]
            self._totals = [0.0] * len(leaves)
            self._weights = [0.0] * len(leaves)
            self._rows = [[] for _ in leaves]
        elif structure != self._structure:
            raise LossError(
                f"the metrics changed their structure between batches: {structure} after {self._structure}",
                where="fa.evaluate",
                fix="return the same keys for every batch",
            )
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Concat):
                # rows of a filler are left out, but their shape is the one that ranks without rows send
                rows = rows_of_concat(leaf, "fa.evaluate")
                self._rows[index].append(rows if batch.valid else rows[:0])
            elif batch.valid:
                total, weight = parts_of(leaf, batch.valid, "fa.evaluate")
                # bf16 would stop counting at 256
                self._totals[index] = self._totals[index] + self._wide(total)
                self._weights[index] = self._weights[index] + self._wide(weight)

    def _wide(self, value: Tree) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)

    def finish(self) -> Any:
        """The combined metrics, equal on all ranks.

        Raises:
            LoaderError: there was no batch.
            LossError: rows differ in width, and `fa.Concat` has no `pad`.
        """
        if self._structure is None:
            raise LoaderError("the data holds no batch", where="fa.evaluate", fix="give one item or more")
        totals, weights = self._summed()
        values: list[Any] = []
        for index, kind in enumerate(self._kinds):
            if kind is Concat:
                rows, group = self._rows[index], self._mesh.group("batch")
                # in the order of the samples: batch by batch, and within a batch rank by rank
                values.append(
                    concatenated(rows, self._pads[index], group, where="fa.evaluate", by_batch=True)
                )
            elif kind is Sum:
                values.append(totals[index])
            else:
                values.append(totals[index] / weights[index])
        return tree.unflatten(self._structure, values)

    def _summed(self) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._mesh.world.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        flat = [torch.as_tensor(x, dtype=dtype, device=device) for x in (*self._totals, *self._weights)]
        packed = torch.stack(flat)
        group = self._mesh.group("batch")
        if group is not None:
            # gloo aborts the process if an all-reduce meets one of another size, such as that of a step
            agree(scope(group, self._mesh.world, "evaluate"), Call("evaluate", f"{len(flat)} sums"))
            dist.all_reduce(packed, group=group)
        totals, weights = packed.split(len(self._totals))
        return totals, weights
