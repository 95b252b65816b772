"""How parameters lie over the axes of a mesh: as states show them, and how many ranks hold the same part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fnaccel import _torch
from fnaccel.models.building import Built
from fnaccel.models.parameter import Cut, Leaf
from fnaccel.world.mesh import Mesh


def shown_over(mesh: Mesh, param: Any, cut: Cut | None = None) -> Any:
    """A parameter as states show it: over all axes of the mesh, with copies along those that do not cut it.

    So exactly one rank writes each of its pieces to a checkpoint. Its memory is that of the parameter, and it
    requires no gradient, so arithmetic on states makes no graph.
    """
    sharded = hasattr(param, "placements")
    axes = mesh.shown.mesh_dim_names if mesh.shown is not None else ()
    names = param.device_mesh.mesh_dim_names if sharded else ()
    if not (sharded or (cut is not None and cut.dim is not None)) or set(names) == set(axes):
        return param.detach()
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 - slow to import

    placements: dict[str, Any] = {axis: param.placements[number] for number, axis in enumerate(names)}
    if cut is not None:
        placements[cut.axis] = cut.placement
    shape = param.shape if cut is None else cut.shape
    return _torch.dtensor_of(
        _torch.local_of(param).detach(),
        mesh.shown,
        [placements.get(axis, Replicate()) for axis in axes],
        shape,
        strides_of(shape, param),
    )


def strides_of(shape: torch.Size, part: torch.Tensor) -> tuple[int, ...]:
    """The strides of a whole parameter: those of its part if that is all of it, else the ordinary ones."""
    if shape == part.shape:
        return part.stride()
    strides: list[int] = []
    elements = 1
    for size in reversed(shape):
        strides.append(elements)
        elements *= size
    return tuple(reversed(strides))


def leaves_of(built: Built, mesh: Mesh) -> tuple[Leaf, ...]:
    """The trainable parameters, with one leaf for each."""
    return tuple(
        leaf_of(name, param, mesh, built.cuts)
        for name, param in built.named("parameters")
        if param.requires_grad
    )


def leaf_of(name: str, param: Any, mesh: Mesh, cuts: Mapping[str, Cut]) -> Leaf:
    """The leaf of a parameter."""
    shown = shown_over(mesh, param, cuts.get(name))
    return Leaf(name, param, _torch.local_of(param).detach(), shown, copies_of(mesh, shown))


def copies_of(mesh: Mesh, shown: Any) -> int:
    """How many ranks hold the same part of a parameter, among those that together hold the whole model."""
    copies = mesh["model"].size
    for number, placement in enumerate(getattr(shown, "placements", ())):
        if not placement.is_replicate():
            copies //= mesh.shown.size(number)
    return copies


def parameters_shown(built: Built, mesh: Mesh) -> dict[str, Any]:
    """All parameters by name, as states show them."""
    return {name: shown_over(mesh, param, built.cuts.get(name)) for name, param in built.named("parameters")}
