"""`fsdp` without hooks, for a step that is captured as one graph.

Parameters are gathered by plain operations of the graph, one all-gather for each unit, and their
gradients leave it through one reduce-scatter each (Rajbhandari et al. 2020). Gathered parameters stay
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
from fnaccel.engine.capture import Opened
from fnaccel.extend import Build, Built, Capture, Cut, Engine, Forward, Layout, Leaf
from fnaccel.models.blocks import find_units
from fnaccel.strategies.fsdp import Fsdp
from fnaccel.strategies.fsdp_regather import GatheredShards, gathered_shards, zero3_pass
from fnaccel.strategies.layout import copies_of, strides_of
from fnaccel.strategies.partial_gradients import with_sums_in_graph
from fnaccel.strategies.shard_dims import shard_dims

_NARROW = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that may be sent in another precision
# autocast casts the weights of these by itself: gathered in the compute dtype, they come out the same
_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@attrs.frozen
class _Piece:
    """A parameter: its names, its slices over the ranks, and this rank's part as the graph takes it.

    Attributes:
        name: its canonical name.
        hosted: its name in the host module.
        param: as states show it.
        shape: of the tensor that modules compute with, which model axes may have cut.
        dim: the dimension that is sharded. None if each rank has all of it.
        chunk: the slices of each rank but the last ones. 0 if each rank has all of it.
        local: this rank's slices.
        trained: whether it has a gradient.
        copies: see `Leaf`.
    """

    name: str
    hosted: str
    param: Any
    shape: torch.Size
    dim: int | None
    chunk: int
    local: torch.Tensor
    trained: bool
    copies: int

    @property
    def width(self) -> int:
        """Elements that every rank sends: the last ranks' slices are padded."""
        return self.chunk * math.prod(self.shape) // self.shape[self.dim or 0]

    def sliced(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor of it with the sharded dimension first."""
        return value.movedim(self.dim, 0) if self.dim else value

    def joined(self, slices: torch.Tensor) -> torch.Tensor:
        """The inverse of `sliced`, of flat slices."""
        if not self.dim:
            return slices.reshape(-1, *self.shape[1:])
        others = (size for number, size in enumerate(self.shape) if number != self.dim)
        return slices.reshape(-1, *others).movedim(0, self.dim)


@attrs.frozen
class _Unit:
    """Parameters that are gathered together, in one dtype."""

    pieces: tuple[_Piece, ...]
    dtype: torch.dtype
    trained: bool


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
    shards = _Shards(units, trained, build)

    def run(fn: Callable[..., Any], *args: Any) -> Any:
        return torch.func.functional_call(host, shards.gather(), (fn, *args))

    def opened() -> Opened:
        whole = shards.gather()
        for piece in trained:
            whole[piece.hosted] = whole[piece.hosted].detach().requires_grad_()

        def run_opened(fn: Callable[..., Any], *args: Any) -> Any:
            return torch.func.functional_call(host, whole, (fn, *args))

        return [whole[piece.hosted] for piece in trained], run_opened

    leaves = tuple(Leaf(p.name, p.param, p.local, p.param, p.copies) for p in trained)
    capture = Capture(
        leaves=leaves,
        open=opened,
        blank=lambda: [torch.zeros(p.shape, dtype=p.local.dtype, device=p.local.device) for p in trained],
        average=shards.average,
        graph_pass=zero3_pass(shards.gathered()) if options.reshard_after_forward else None,
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


def _units(built: Built, build: Build, options: Fsdp) -> list[_Unit]:
    """All parameters cut over the ranks and grouped as they are gathered, the root's last."""
    owners = _owners(built, options)
    mesh = build.spec.mesh
    dims = shard_dims(built, mesh["shard"].size, mesh.degrees, asked=options.dims)
    cast = build.settings.precision.compute if build.settings.precision.autocast else None
    safe = {id(p) for m in built.host.modules() if isinstance(m, _CAST) for p in m.parameters(recurse=False)}
    groups: dict[Any, list[_Piece]] = {}
    names = {id(p): name for name, p in built.host.named_parameters()}
    for name, param in built.named("parameters"):
        dtype = cast if cast is not None and id(param) in safe else param.dtype
        key = (owners.get(id(param), -1), param.requires_grad, dtype)
        piece = _cut(name, names[id(param)], param, build, built.cuts.get(name), dims[name])
        groups.setdefault(key, []).append(piece)
    ordered = sorted(groups.items(), key=lambda item: item[0][0] % (len(owners) + 1))
    return [_Unit(tuple(pieces), dtype, trained) for (_, trained, dtype), pieces in ordered]


def _owners(built: Built, options: Fsdp) -> dict[int, int]:
    """The number of the innermost unit of each parameter, without the root's parameters."""
    units = [
        unit
        for key, module in built.modules.items()
        for _, unit in find_units(module, built.units.get(key, options.units), "fa.fsdp(units=...)")
    ]
    owners: dict[int, int] = {}
    for number, unit in reversed(list(enumerate(units))):
        for param in unit.parameters():
            owners.setdefault(id(param), number)
    return owners


def _cut(
    name: str, hosted: str, param: torch.Tensor, build: Build, cut: Cut | None, dim: int | None
) -> _Piece:
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415 - slow to import

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
    shown = DTensor.from_local(
        part, mesh.shown, placements, run_check=False, shape=shape, stride=strides_of(shape, full)
    )
    shard = nn.Parameter(shown, requires_grad=param.requires_grad)
    local = _torch.local_of(shard).detach()
    copies = copies_of(mesh, shard)
    return _Piece(name, hosted, shard, param.shape, dim, chunk, local, param.requires_grad, copies)


class _Shards:
    """Gathers parameters and reduces their gradients, one collective for each unit, for compiled code."""

    def __init__(self, units: Sequence[_Unit], trained: Sequence[_Piece], build: Build) -> None:
        mesh = build.spec.mesh
        self._axis = mesh["shard"]
        self._replicas = mesh.group("dp_replicate") if mesh.degrees.get("dp_replicate", 1) > 1 else None
        self._reduce = build.settings.precision.reduce
        self._ranks = mesh.loss_size
        self._units = units
        place = {piece.name: index for index, piece in enumerate(trained)}
        # the last units' gradients come first
        members = [
            [(place[piece.name], piece) for piece in unit.pieces if piece.dim is not None]
            for unit in reversed(units)
            if unit.trained
        ]
        self._members = [unit for unit in members if unit]
        self._whole = [(place[piece.name], piece) for piece in trained if piece.dim is None]
        self._loss_group = mesh.group("loss")

    def gather(self) -> dict[str, torch.Tensor]:
        """All parameters whole, by their names in the host module. No gradient flows through this."""
        whole: dict[str, torch.Tensor] = {}
        size = self._axis.size
        with torch.no_grad():
            for unit in self._units:
                pieces = [piece for piece in unit.pieces if piece.dim is not None]
                whole |= {p.hosted: p.local.to(unit.dtype) for p in unit.pieces if p.dim is None}
                if not pieces:
                    continue
                flat = torch.cat([_padded(piece) for piece in pieces]).to(unit.dtype)
                rows = _torch.all_gather_in_graph(flat, size, self._axis.group).view(size, -1)
                parts = rows.split([piece.width for piece in pieces], dim=1)
                for piece, part in zip(pieces, parts, strict=True):
                    elements = math.prod(piece.shape)
                    whole[piece.hosted] = piece.joined(part.reshape(-1)[:elements])
        return whole

    def gathered(self) -> list[GatheredShards]:
        """What each all-gather of `gather` takes."""
        if self._axis.group is None:
            return []
        units = [[piece.local for piece in unit.pieces if piece.dim is not None] for unit in self._units]
        return [gathered_shards(self._axis.group.group_name, shards) for shards in units if shards]

    def average(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's rows of the mean over ranks of whole gradients."""
        reductions = [self._begin([(grads[index], piece) for index, piece in unit]) for unit in self._members]
        averaged = list(grads)
        for unit, flat in zip(self._members, reductions, strict=True):
            part = flat if self._axis.group is None else _torch.end_collective(flat)
            if self._replicas is not None:
                part = _torch.end_collective(_torch.begin_all_reduce(part, self._replicas))
            for (index, piece), rows in zip(unit, part.split([p.width for _, p in unit]), strict=True):
                local = piece.joined(rows[: piece.local.numel()])
                averaged[index] = local.to(piece.local.dtype)
        for index, piece in self._whole:
            grad = (grads[index].to(self._reduce) / self._ranks).contiguous()
            if self._loss_group is not None:
                grad = _torch.end_collective(_torch.begin_all_reduce(grad, self._loss_group))
            averaged[index] = grad.to(piece.local.dtype)
        return averaged

    def _begin(self, unit: list[tuple[torch.Tensor, _Piece]]) -> torch.Tensor:
        size = self._axis.size
        rows = [
            F.pad(piece.sliced(grad).reshape(-1), (0, size * piece.width - grad.numel())).view(size, -1)
            if size * piece.width > grad.numel()
            else piece.sliced(grad).reshape(size, -1)
            for grad, piece in unit
        ]
        flat = torch.cat(rows, dim=1).reshape(-1)
        outgoing = flat.to(self._reduce) if flat.dtype in _NARROW else flat
        return _torch.begin_reduce_scatter(outgoing / self._ranks, size, self._axis.group)


def _padded(piece: _Piece) -> torch.Tensor:
    flat = piece.sliced(piece.local).reshape(-1)
    missing = piece.width - flat.numel()
    return F.pad(flat, (0, missing)) if missing else flat
