"""Gradients of which each rank along an axis has one summand: added once, after the last backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fnaccel import _torch
from fnaccel.engine.engine import Capture, Hooks
from fnaccel.errors import CapabilityError
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
    if not built.cuts:
        return hooks
    params, group = _members(built, mesh)
    before = hooks.finish
    checked = False

    def finish() -> None:
        nonlocal checked
        if before is not None:
            before()
        if not checked:
            _check_copies(built, mesh)
            checked = True
        if group is None:
            return
        grads = [_torch.local_of(param.grad) for param in params if param.grad is not None]
        for same in _by_dtype(grads):
            flat = torch.cat([grad.reshape(-1) for grad in same])
            dist.all_reduce(flat, group=group)
            for grad, part in zip(same, flat.split([grad.numel() for grad in same]), strict=True):
                grad.copy_(part.view(grad.shape))

    return attrs.evolve(hooks, finish=finish)


def _check_copies(built: Built, mesh: Mesh, axis: str = "tp") -> None:
    """Compare the first gradients of parameters that ranks along the axis hold whole.

    Raises:
        CapabilityError: they differ. The copies would drift apart.
    """
    group = mesh.group(axis) if axis in mesh.degrees else None
    whole = {name: param for name, param in built.named("parameters") if name not in built.cuts}
    grads = {name: _torch.local_of(param.grad) for name, param in whole.items() if param.grad is not None}
    if group is None or not grads:
        return
    norms = torch.stack([grad.detach().float().norm() for grad in grads.values()])
    largest, smallest = norms.clone(), norms.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
    # the order of sums may differ between devices, and a gradient of 0 is only noise
    differ = (largest - smallest > 0.01 * largest) & (largest > 1e-4 * largest.max())
    names = [name for name, apart in zip(grads, differ.tolist(), strict=True) if apart]
    if names:
        more = f", and {len(names) - 1} more," if len(names) > 1 else ""
        raise CapabilityError(
            f"ranks along {axis} compute different gradients of {names[0]}{more} "
            "which each of them has whole",
            where="the first train_step(state, batch)",
            fix='mark the module as "sequence" or "replicate_partial" in the plan, so that gradients are '
            'added; or end column layers with a "rowwise" layer; or build equal values on all ranks; or, '
            'with dropout under rng="stream", seed PyTorch alike on these ranks',
        )


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
