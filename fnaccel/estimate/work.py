"""The work of a step: floating-point operations, and collectives by axis and kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import torch

from fnaccel.estimate._torch import group_of
from fnaccel.models._torch import tree_leaves
from fnaccel.models.operation_counts import COLLECTIVE_KINDS, operation_counts

Link = tuple[str, str]
"""A mesh axis, and a kind of collective."""

_FORMULAS = operation_counts()
_NAMESPACES = ("c10d", "_c10d_functional")


def along_tp(_: str) -> str:
    """The axis of all groups of a trace without shards."""
    return "tp"


@attrs.define
class Work:
    """Operations and collectives, counted from the beginning.

    Attributes:
        flops: floating-point operations of matrix products, grouped ones too, convolutions and attention.
        counts: collectives by link.
        sizes: their bytes by link. Of a gather, the result. Of a reduction, the argument.

    Example:
        >>> work = fa.estimate.Work()
        >>> work.send("shard", "all_gather", 1_000)
        >>> work.sizes["shard", "all_gather"]
        1000
    """

    flops: int = 0
    counts: Counter[Link] = attrs.field(factory=Counter)
    sizes: Counter[Link] = attrs.field(factory=Counter)

    def send(self, axis: str, kind: str, size: int, count: int = 1) -> None:
        """Count collectives of one kind."""
        self.counts[axis, kind] += count
        self.sizes[axis, kind] += size

    def add(self, other: Work) -> None:
        """Count the work of another trace, too."""
        self.flops += other.flops
        self.counts += other.counts
        self.sizes += other.sizes

    def copy(self) -> Work:
        """The work until now."""
        return Work(self.flops, self.counts.copy(), self.sizes.copy())

    def repeat(self, since: Work, times: int) -> None:
        """Count the work that was done since then as often again."""
        self.flops += (self.flops - since.flops) * times
        for totals, before in ((self.counts, since.counts), (self.sizes, since.sizes)):
            for link in list(totals):
                totals[link] += (totals[link] - before[link]) * times

    def observe(
        self,
        operation: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
        axis_of: Callable[[str], str] = along_tp,
    ) -> None:
        """Count an operation of a trace.

        Args:
            operation: the operation.
            args: its arguments.
            kwargs: its arguments by name.
            result: its result.
            axis_of: the mesh axis of a process group, by the group's name.
        """
        formula: Any = _FORMULAS.get(getattr(operation, "overloadpacket", None))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        elif getattr(operation, "namespace", "") in _NAMESPACES:
            name = operation.overloadpacket.__name__.strip("_")
            kind = COLLECTIVE_KINDS.get(name)
            if kind is not None:
                values = result if kind == "all_gather" else args
                tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
                # of an operation in place, the argument is the result
                size = max((value.nbytes for value in tensors), default=0)
                self.send(axis_of(group_of(args)), kind, size)
