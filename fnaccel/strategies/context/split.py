"""The ranks that share a sequence while a loss runs, and the tensors that they send each other."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist

from fnaccel import _torch
from fnaccel.strategies.context.order import Chunks


@attrs.frozen
class Split:
    """The ranks that share each sequence of a step.

    Attributes:
        chunks: the positions of each rank.
        group: the ranks.
        method: how attention reaches the keys of other ranks.
        lengths: the numbers of positions of this rank, one for each length of sequence in the step.
        uncut: the numbers of tokens of the leaves of the batch that every rank has whole.
    """

    chunks: Chunks
    group: dist.ProcessGroup = attrs.field(eq=False, repr=False)
    method: str
    lengths: tuple[int, ...] = ()
    uncut: tuple[int, ...] = ()

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """All positions of a tensor, in the order of the sequence. Gradients are summed over ranks.

        Args:
            part: this rank's positions, along `dim`.
            dim: counted from the end.
        """
        # positions first: the parts of ranks are then one after the other in memory
        rows = part.movedim(dim, 0).contiguous()
        return _Gathered.apply(rows, self.chunks, self.group).movedim(0, dim)


class _Gathered(torch.autograd.Function):
    """All-gather along dim 0, and reduce-scatter of the gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, chunks: Chunks, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.chunks, ctx.group = chunks, group
        return chunks.in_order(_torch.all_gather_in_graph(part, chunks.ranks, group))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        by_rank = ctx.chunks.by_rank(grads[0]).contiguous()
        summed = _torch.begin_reduce_scatter(by_rank, ctx.chunks.ranks, ctx.group)
        return _torch.end_collective(summed), None, None
