"""Collectives along the tensor axis through which gradients flow (Shoeybi et al. 2019, section 3).

Each is a pair: its backward is another collective. All of them are operations of a graph, so that eager and
captured steps run the same.
"""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx

from fnaccel import _torch

Group = dist.ProcessGroup
Collective = Callable[[torch.Tensor, Group, int], torch.Tensor]


def all_reduce(value: torch.Tensor, group: Group, operation: str = "sum") -> torch.Tensor:
    """The sum, or the maximum, over ranks. No gradient flows through it."""
    return _torch.end_collective(_torch.begin_all_reduce(value.contiguous(), group, operation))


def _all_gather(value: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    size = group.size()
    first = value.movedim(dim, 0).contiguous()
    whole = _torch.all_gather_in_graph(first, size, group).movedim(0, dim)
    # FSDP2 warns of a block whose output is a view
    return whole.clone(memory_format=torch.contiguous_format)


def _reduce_scatter(value: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    size = group.size()
    first = value.movedim(dim, 0).contiguous()
    return _torch.end_collective(_torch.begin_reduce_scatter(first, size, group)).movedim(0, dim)


def _own(value: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return value.chunk(group.size(), dim)[group.rank()].contiguous()


class _Context(FunctionCtx):
    """The ranks and the dimension of a collective, and the collective of its backward."""

    group: Group
    dim: int
    back: Collective


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, value: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, value: torch.Tensor, group: Group) -> torch.Tensor:  # noqa: ARG004
        return all_reduce(value, group)

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return grad, None


class _Along(torch.autograd.Function):
    """A collective along a dimension, whose backward is another one."""

    @staticmethod
    def forward(
        ctx: _Context, value: torch.Tensor, group: Group, dim: int, there: Collective, back: Collective
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.back = group, dim, back
        return there(value, group, dim)

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return ctx.back(grad, ctx.group, ctx.dim), None, None, None, None


def copied(value: torch.Tensor, group: Group) -> torch.Tensor:
    """A tensor that all ranks have, for different uses on each: backward adds the gradients."""
    return cast("torch.Tensor", _Copy.apply(value, group))


def summed(value: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of the ranks' tensors. Backward passes the gradient, which is the same on all ranks."""
    return cast("torch.Tensor", _Sum.apply(value, group))


def gathered_for_parts(value: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The ranks' slices joined, for different uses on each: backward adds the gradients and cuts them."""
    return cast("torch.Tensor", _Along.apply(value, group, dim, _all_gather, _reduce_scatter))


def summed_and_cut(value: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's slice of the sum of the ranks' tensors. Backward joins the gradients of all slices."""
    return cast("torch.Tensor", _Along.apply(value, group, dim, _reduce_scatter, _all_gather))


def scattered(value: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's slice of a tensor that all ranks have. Backward joins the gradients of all slices."""
    return cast("torch.Tensor", _Along.apply(value, group, dim, _own, _all_gather))


def gathered(value: torch.Tensor, group: Group, dim: int, length: int) -> torch.Tensor:
    """The ranks' slices joined, for the same use on all ranks: backward takes this rank's slice.

    Args:
        value: this rank's slice. All ranks but the last ones have `ceil(length / ranks)` of them.
        group: the ranks.
        dim: the dimension along which slices are joined.
        length: of the whole dimension.
    """
    size = group.size()
    chunk = -(-length // size)
    dim %= value.dim()
    missing = chunk - value.shape[dim]
    if missing:
        value = F.pad(value, (0, 0) * (value.dim() - 1 - dim) + (0, missing))
    whole = cast("torch.Tensor", _Along.apply(value, group, dim, _all_gather, _own))
    return whole.narrow(dim, 0, length) if size * chunk > length else whole
