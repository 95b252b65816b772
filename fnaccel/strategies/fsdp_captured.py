"""`fsdp` without hooks, for a step that is captured as one graph.

Parameters are gathered by plain operations of the graph, one all-gather for each unit, and their
gradients leave it through one reduce-scatter each (Rajbhandari et al. 2020). Gathered parameters stay
until backward has used it (ZeRO-2), unless `regather` rewrites the graph (ZeRO-3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fnaccel import _torch
from fnaccel.engine.engine import Opened
from fnaccel.extend import Build, Built, Capture, Cut, Engine, Forward, Layout, Leaf, Mesh
from fnaccel.strategies.fsdp import Fsdp
from fnaccel.strategies.fsdp_regather import GatheredShards, gathered_shards, zero3_pass
from fnaccel.strategies.layout import copies_of, strides_of
from fnaccel.strategies.partial_gradients import with_sums_in_graph
from fnaccel.strategies.shard_dims import owners_of, shard_dims
from fnaccel.strategies.whole_leaves import Piece, Shards, Unit

# autocast casts the weights of these by itself: gathered in the compute dtype, they come out the same
_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def build_captured(built: Built, build: Build, options: Fsdp) -> Engine:
    """The engine whose gathering and reducing are part of the step's graph."""
    mesh = build.spec.mesh
    for _, buffer in built.named("buffers"):
        buffer.data = buffer.data.to(mesh.world.device)
    units = _units(built, build, options)
    pieces = {piece.name: piece for unit in units for piece in unit.pieces}
    order = [name for name, _ in built.named("parameters")]
    _torch.replace_parameters(built.host, lambda p: nn.Parameter(p.to("meta"), requires_grad=p.requires_grad))
    host = built.host
    trained = [pieces[name] for name in order if pieces[name].trained]
    shards = Shards(units, trained, mesh, build.settings.precision.reduce)

    def opened() -> Opened:
        whole = shards.gather()
        for piece in trained:
            whole[piece.hosted] = whole[piece.hosted].detach().requires_grad_()

        def run_opened(fn: Callable[..., Any], *args: Any) -> Any:
            return torch.func.functional_call(host, whole, (fn, *args))

        return [whole[piece.hosted] for piece in trained], run_opened

    def run(fn: Callable[..., Any], *args: Any) -> Any:
        return opened()[1](fn, *args)

    leaves = tuple(Leaf(p.name, p.param, p.local, p.param, p.copies) for p in trained)
    capture = Capture(
        leaves=leaves,
        open=opened,
        blank=lambda: [torch.zeros(p.shape, dtype=p.local.dtype, device=p.local.device) for p in trained],
        average=shards.average,
        graph_pass=zero3_pass(_gathered(units, mesh)) if options.reshard_after_forward else None,
    )
    capture = with_sums_in_graph(capture, built, mesh)
    return Engine(
        name="fsdp",
        layout=Layout(
            mesh=mesh,
            model=built.model,
            leaves=leaves,
            parameters={name: pieces[name].param for name in order},
            buffers=dict(built.named("buffers")),
        ),
        forward=Forward(run=run, lend=run, capture=capture),
    )


def _units(built: Built, build: Build, options: Fsdp) -> list[Unit]:
    """All parameters cut over the ranks and grouped as they are gathered, the root's last."""
    owners = owners_of(built, options)
    mesh = build.spec.mesh
    dims = shard_dims(built, mesh.degrees, options)
    cast = build.settings.precision.compute if build.settings.precision.autocast else None
    safe = {id(p) for m in built.host.modules() if isinstance(m, _CAST) for p in m.parameters(recurse=False)}
    groups: dict[Any, list[Piece]] = {}
    names = {id(p): name for name, p in built.host.named_parameters()}
    for name, param in built.named("parameters"):
        dtype = cast if cast is not None and id(param) in safe else param.dtype
        key = (owners[id(param)], param.requires_grad, dtype)
        piece = _cut(name, names[id(param)], param, build, built.cuts.get(name), dims[name])
        groups.setdefault(key, []).append(piece)
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return [Unit(tuple(pieces), dtype, trained) for (_, trained, dtype), pieces in ordered]


def _cut(
    name: str, hosted: str, param: torch.Tensor, build: Build, cut: Cut | None, dim: int | None
) -> Piece:
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - slow to import

    mesh = build.spec.mesh
    axis = mesh["shard"]
    full = param.detach()
    if dim is None:
        chunk, part = 0, full.to(mesh.world.device, copy=True)
    else:
        chunk = -(-full.shape[dim] // axis.size)
        start = min(axis.rank * chunk, full.shape[dim])
        part = full.narrow(dim, start, min(chunk, full.shape[dim] - start)).contiguous()
        part = part.to(mesh.world.device, copy=True)
    names = mesh.shown.mesh_dim_names
    placements: list[Any] = [Replicate()] * len(names)
    if dim is not None:
        placements[names.index(mesh.shard_dim)] = Shard(dim)
    if cut is not None:
        placements[names.index(cut.axis)] = cut.placement
    shape = full.shape if cut is None else cut.shape
    shown = _torch.dtensor_of(part, mesh.shown, placements, shape, strides_of(shape, full))
    shard = nn.Parameter(shown, requires_grad=param.requires_grad)
    local = _torch.local_of(shard).detach()
    copies = copies_of(mesh, shard)
    return Piece(name, hosted, shard, param.shape, dim, chunk, local, param.requires_grad, copies)


def _gathered(units: Sequence[Unit], mesh: Mesh) -> list[GatheredShards]:
    """What each all-gather of the graph takes."""
    group = mesh["shard"].group
    if group is None:
        return []
    parts = [[piece.local for piece in unit.pieces if piece.dim is not None] for unit in units]
    return [gathered_shards(group.group_name, shards) for shards in parts if shards]
