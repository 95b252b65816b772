"""Batch norm whose statistics are taken over the rows of all ranks, in each micro-batch.

torch's SyncBatchNorm runs on GPUs only. Here one all-reduce in the forward pass sums counts, means and
squares, and one in the backward pass sums two gradients of each channel (Ioffe and Szegedy 2015, over ranks:
https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html).
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fnaccel.errors import CapabilityError
from fnaccel.models._torch import BatchNorm, applied, check_norm_input

_FORWARDS = (BatchNorm.forward, nn.SyncBatchNorm.forward)


class NormScope:
    """What the synchronised norms of a model share.

    Attributes:
        group: the ranks. None on a single rank, where norms are torch's own.
        counts: whether the micro-batch counts. A filler sends zeros and a count of 0.
    """

    __slots__ = ("__weakref__", "counts", "group")

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.counts = True


_scopes: weakref.WeakKeyDictionary[nn.Module, NormScope] = weakref.WeakKeyDictionary()


def synchronise(root: nn.Module, where: str) -> None:
    """Patch the forward of each batch norm of a model.

    Raises:
        CapabilityError: there is none, or one has a forward of its own.
    """
    norms = [(path, module) for path, module in root.named_modules() if isinstance(module, BatchNorm)]
    own = [path for path, norm in norms if type(norm).forward not in _FORWARDS]
    if not norms:
        raise CapabilityError("the model has no batch norm", where=where, fix="leave the transform out")
    if own:
        raise CapabilityError(
            f"{own[0]} is a batch norm with a forward of its own",
            where=where,
            fix="write it as a batch norm of torch, followed by the rest",
        )
    scope = _scopes[root] = NormScope()
    forward = _forward_in(scope)
    for _, norm in norms:
        norm.forward = types.MethodType(forward, norm)


def connect(roots: Iterable[nn.Module], group: dist.ProcessGroup | None) -> Callable[[bool], None] | None:
    """Let the synchronised norms of modules take their statistics over a group.

    Returns:
        A function that tells them whether the micro-batch counts. None without such norms.
    """
    scopes = [scope for root in roots if (scope := _scopes.get(root)) is not None]
    if not scopes or group is None:
        return None
    for scope in scopes:
        scope.group = group

    def tell(counts: bool) -> None:
        for scope in scopes:
            scope.counts = counts

    return tell


def _forward_in(scope: NormScope) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def forward(norm: Any, value: torch.Tensor) -> torch.Tensor:
        if not norm.training or scope.group is None:
            return BatchNorm.forward(norm, value)
        check_norm_input(norm, value)
        result, mean, var, count = applied(_Normalised, value, norm.weight, norm.bias, norm.eps, scope)
        if norm.track_running_stats:
            _track(norm, mean, var, count)
        return result

    return forward


@torch.no_grad()
def _track(norm: Any, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor) -> None:
    """Move the running statistics, as torch does, unless no rank had a row that counts."""
    some = count > 0
    norm.num_batches_tracked.add_(some)
    share = norm.momentum
    if share is None:  # the average of all micro-batches
        share = 1.0 / norm.num_batches_tracked.clamp(min=1)
    unbiased = var * (count / (count - 1).clamp(min=1)).to(var.dtype)
    for running, now in ((norm.running_mean, mean), (norm.running_var, unbiased)):
        moved = running + share * (now - running)
        running.copy_(torch.where(some, moved.to(running.dtype), running))


class _Normalised(torch.autograd.Function):
    """(rows normalised over all ranks, mean, biased variance, number of elements of a channel)."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        scope: NormScope,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        dims = [0, *range(2, value.dim())]
        channels = value.shape[1]
        sums = torch.zeros(1 + 2 * channels, dtype=_sum_type(value), device=value.device)
        if scope.counts and value.numel():
            number = value.numel() // channels
            var, mean = torch.var_mean(wide, dims, correction=0)
            mean = mean.to(sums.dtype)
            sums[0] = number
            sums[1 : 1 + channels] = number * mean
            sums[1 + channels :] = number * (var + mean * mean)
        dist.all_reduce(sums, group=scope.group)
        count = sums[0]
        mean, square = (sums[1:] / count.clamp(min=1)).split(channels)
        var = (square - mean * mean).clamp(min=0).to(wide.dtype)
        mean, inverse = mean.to(wide.dtype), (var + eps).rsqrt()
        result = (wide - _spread(mean, value)) * _spread(inverse, value)
        if weight is not None:
            result = result * _spread(weight, value)
        if bias is not None:
            result = result + _spread(bias, value)
        ctx.save_for_backward(value, weight, mean, inverse, count)
        ctx.scope, ctx.counted, ctx.has_bias = scope, scope.counts, bias is not None
        ctx.mark_non_differentiable(mean, var, count)
        return result.to(value.dtype), mean, var, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        value, weight, mean, inverse, count = ctx.saved_tensors
        wide = value.to(mean.dtype)
        dims = [0, *range(2, value.dim())]
        normal = (wide - _spread(mean, value)) * _spread(inverse, value)
        grad_wide = grad.to(wide.dtype)
        local = torch.cat([grad_wide.sum(dims), (grad_wide * normal).sum(dims)])
        # of a micro-batch that does not count, gradients may be NaN
        counts = ctx.counted and ctx.scope.counts
        sums = local.to(_sum_type(value)) if counts else torch.zeros_like(local, dtype=_sum_type(value))
        dist.all_reduce(sums, group=ctx.scope.group)
        by_one, by_normal = (sums / count.clamp(min=1)).to(wide.dtype).split(len(mean))
        scale = inverse if weight is None else inverse * weight
        inner = grad_wide - _spread(by_one, value) - normal * _spread(by_normal, value)
        grad_value = (inner * _spread(scale, value)).to(value.dtype) if counts else torch.zeros_like(value)
        grad_bias, grad_weight = local.split(len(mean))
        return (
            grad_value,
            grad_weight.to(weight.dtype) if weight is not None else None,
            grad_bias.to(mean.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            None,
            None,
        )


def _sum_type(value: torch.Tensor) -> torch.dtype:
    return torch.float32 if value.device.type == "mps" else torch.float64


def _spread(channels: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One number for each channel, shaped to be broadcast over a batch of shape `[rows, channels, ...]`."""
    return channels.view(1, -1, *[1] * (value.dim() - 2))
