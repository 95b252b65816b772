"""Gradients of which each rank along an axis has one summand: added once, after the last backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fnaccel import _torch
from fnaccel.engine.capture import Capture
from fnaccel.engine.engine import Hooks
from fnaccel.models.building import Built
from fnaccel.models.parameter import Leaf
from fnaccel.world.mesh import Mesh


def _members(built: Built, mesh: Mesh, axis: str = "tp") -> tuple[list[Any], dist.ProcessGroup | None]:
    cuts = built.cuts
    params = [
        param
        for name, param in built.named("parameters")
        if name in cuts and cuts[name].partial and param.requires_grad
    ]
    return params, mesh.group(axis) if params else None


def with_sums(hooks: Hooks, built: Built, mesh: Mesh) -> Hooks:
    """The hooks of an engine that adds partial gradients before its gradients are read."""
    params, group = _members(built, mesh)
    if group is None:
        return hooks
    before = hooks.finish

    def finish() -> None:
        if before is not None:
            before()
        grads = [_torch.local_of(param.grad) for param in params if param.grad is not None]
        for same in _by_dtype(grads):
            flat = torch.cat([grad.reshape(-1) for grad in same])
            dist.all_reduce(flat, group=group)
            for grad, part in zip(same, flat.split([grad.numel() for grad in same]), strict=True):
                grad.copy_(part.view(grad.shape))

    return attrs.evolve(hooks, finish=finish)


def with_sums_in_graph(capture: Capture, built: Built, mesh: Mesh) -> Capture:
    """A capture whose averaged gradients have the sums of partial ones."""
    _, group = _members(built, mesh)
    if group is None:
        return capture
    before = capture.average
    places = [place for place, leaf in enumerate(capture.leaves) if _is_partial(leaf, built)]

    def average(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        averaged = list(grads if before is None else before(grads))
        for same in _by_dtype([averaged[place] for place in places]):
            flat = torch.cat([grad.reshape(-1) for grad in same])
            total = _torch.end_collective(_torch.begin_all_reduce(flat, group))
            parts = iter(total.split([grad.numel() for grad in same]))
            for place in places:
                if averaged[place].dtype is flat.dtype:
                    averaged[place] = next(parts).view(averaged[place].shape)
        return averaged

    return attrs.evolve(capture, average=average)


def _is_partial(leaf: Leaf, built: Built) -> bool:
    return leaf.name in built.cuts and built.cuts[leaf.name].partial


def _by_dtype(grads: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    return list(by_dtype.values())
