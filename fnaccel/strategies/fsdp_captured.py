"""`fsdp` without hooks, for a step that is captured as one graph.

Parameters are gathered by plain operations of the graph, one all-gather for each unit, and their
gradients leave it through one reduce-scatter each (Rajbhandari et al. 2020). What is gathered stays
until backward has used it (ZeRO-2), unless `regather` rewrites the graph (ZeRO-3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from fnaccel import _torch
from fnaccel.capture import Capture
from fnaccel.engine import Engine
from fnaccel.leaf import Leaf
from fnaccel.strategies.construct import Built
from fnaccel.strategies.engines import Request
from fnaccel.strategies.fsdp import Fsdp
from fnaccel.strategies.regather import zero3_pass
from fnaccel.units import find_units

# autocast casts the weights of these by itself: gathered in the compute dtype, they come out the same
_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@attrs.frozen
class _Piece:
    """A parameter: its names, its rows over the ranks, and this rank's part as the graph takes it."""

    name: str
    hosted: str
    param: Any
    shape: torch.Size
    chunk: int
    local: torch.Tensor

    @property
    def width(self) -> int:
        """Elements that every rank sends: the last ranks' rows are padded."""
        return self.chunk * math.prod(self.shape[1:])


@attrs.frozen
class _Unit:
    """Parameters that are gathered together, in one dtype."""

    pieces: tuple[_Piece, ...]
    dtype: torch.dtype


def build_captured(built: Built, request: Request, options: Fsdp) -> Engine:
    """The engine whose gathering and reducing are part of the step's graph."""
    mesh = request.mesh
    for _, buffer in built.named("buffers"):
        buffer.data = buffer.data.to(mesh.world.device)
    units = _units(built, request, options)
    pieces = {piece.name: piece for unit in units for piece in unit.pieces}
    order = [name for name, _ in built.named("parameters")]
    _torch.replace_parameters(built.host, lambda p: nn.Parameter(p.to("meta"), requires_grad=p.requires_grad))
    gather = _gatherer(units, request)
    host = built.host

    def run(fn: Callable[..., Any], *args: Any) -> Any:
        return torch.func.functional_call(host, gather(), (fn, *args))

    trained = [pieces[name] for name in order if pieces[name].local.requires_grad]
    leaves = tuple(Leaf(p.name, p.param, p.local.detach(), _like(p.param)) for p in trained)
    in_graph = tuple(attrs.evolve(leaf, shard=p.local) for leaf, p in zip(leaves, trained, strict=True))
    return Engine(
        name="fsdp",
        mesh=mesh,
        capabilities=request.strategy.capabilities(),
        model=built.model,
        leaves=leaves,
        parameters={name: pieces[name].param for name in order},
        buffers=dict(built.named("buffers")),
        run=run,
        lend=run,
        averaged=mesh.batch_size,
        norm_axes=(mesh["dp_shard"],),
        modules=tuple(built.modules.values()),
        capture=Capture(
            leaves=in_graph, run=run, graph_pass=zero3_pass() if options.reshard_after_forward else None
        ),
    )


def _units(built: Built, request: Request, options: Fsdp) -> list[_Unit]:
    """All parameters cut over the ranks and grouped as they are gathered, the root's last."""
    owners = _owners(built, options)
    cast = request.precision.compute if request.precision.autocast else None
    safe = {id(p) for m in built.host.modules() if isinstance(m, _CAST) for p in m.parameters(recurse=False)}
    groups: dict[Any, list[_Piece]] = {}
    names = {id(p): name for name, p in built.host.named_parameters()}
    for name, param in built.named("parameters"):
        dtype = cast if cast is not None and id(param) in safe else param.dtype
        key = (owners.get(id(param), -1), param.requires_grad, dtype)
        groups.setdefault(key, []).append(_cut(name, names[id(param)], param, request))
    ordered = sorted(groups.items(), key=lambda item: item[0][0] % (len(owners) + 1))
    return [_Unit(tuple(pieces), key[2]) for key, pieces in ordered]


def _owners(built: Built, options: Fsdp) -> dict[int, int]:
    """The number of the innermost unit of each parameter; the root's are left out."""
    found = [
        unit
        for module in built.modules.values()
        for _, unit in find_units(module, options.units, "fa.fsdp(units=...)")
    ]
    owners: dict[int, int] = {}
    for number, unit in reversed(list(enumerate(found))):
        for param in unit.parameters():
            owners.setdefault(id(param), number)
    return owners


def _cut(name: str, hosted: str, param: Any, request: Request) -> _Piece:
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415 - slow to import

    mesh = request.mesh
    axis = mesh["dp_shard"]
    replicas = mesh.degrees.get("dp_replicate", 1) > 1
    full = param.detach() if param.dim() else param.detach().reshape(1)
    chunk = -(-full.shape[0] // axis.size)
    part = full[axis.rank * chunk : (axis.rank + 1) * chunk].to(mesh.world.device, copy=True)
    shown = DTensor.from_local(
        part,
        mesh.device if replicas else mesh.device["dp_shard"],
        [Replicate(), Shard(0)] if replicas else [Shard(0)],
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    held = nn.Parameter(shown, requires_grad=param.requires_grad)
    local = _torch.local_of(held).detach().requires_grad_(param.requires_grad)
    return _Piece(name, hosted, held, param.shape, chunk, local)


def _like(param: Any) -> Callable[[torch.Tensor], Any]:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow to import

    def like(local: torch.Tensor) -> Any:
        return DTensor.from_local(
            local,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )

    return like


def _gatherer(units: Sequence[_Unit], request: Request) -> Callable[[], dict[str, torch.Tensor]]:
    """What gives all parameters whole, by their names in the host module."""
    mesh = request.mesh
    axis = mesh["dp_shard"]
    replicas = mesh.group("dp_replicate") if mesh.degrees.get("dp_replicate", 1) > 1 else None
    reduce, ranks = request.precision.reduce, mesh.batch_size

    class Gather(torch.autograd.Function):
        """All-gather forward; reduce-scatter of the mean over ranks backward."""

        @staticmethod
        def forward(ctx: Any, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            ctx.dtype = flat.dtype
            return _torch.all_gather_in_graph(flat.to(dtype), axis.size, axis.group)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            part = _torch.reduce_scatter_in_graph(grad.to(reduce) / ranks, axis.size, axis.group)
            if replicas is not None:
                part = _torch.end_collective(_torch.begin_all_reduce(part, replicas))
            return part.to(ctx.dtype), None

    def gather() -> dict[str, torch.Tensor]:
        whole: dict[str, torch.Tensor] = {}
        for unit in units:
            flat = torch.cat([_padded(piece) for piece in unit.pieces])
            rows = Gather.apply(flat, unit.dtype).view(axis.size, -1)  # pyright: ignore[reportOptionalMemberAccess]
            parts = rows.split([piece.width for piece in unit.pieces], dim=1)
            for piece, part in zip(unit.pieces, parts, strict=True):
                padded = part.reshape(axis.size * piece.chunk, *piece.shape[1:])
                cut = padded[: piece.shape[0]] if piece.shape else padded[0]
                whole[piece.hosted] = cut
        return whole

    return gather


def _padded(piece: _Piece) -> torch.Tensor:
    flat = piece.local.reshape(-1)
    missing = piece.width - flat.numel()
    return F.pad(flat, (0, missing)) if missing else flat
