"""Parameters held in shards, gathered whole by one collective a unit, and their gradients reduced by one.

`Shards` serves a step that is captured as one graph. `WholeLeaves` serves a loss that takes parameters as
values (`fa.params`) under FSDP2: gradients of all micro-batches add up in whole leaves, and are reduced once.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fnaccel import _torch
from fnaccel.models.building import Built
from fnaccel.models.parameter import Leaf
from fnaccel.models.parameter_values import kept_values
from fnaccel.strategies._torch import shard_groups_of, without_gathering
from fnaccel.strategies.gather_order import GatherOrder
from fnaccel.world.mesh import Mesh

_NARROW = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that may be sent in another precision


@attrs.frozen
class Piece:
    """A parameter: its names, its slices over the ranks, and this rank's part as it is gathered.

    Attributes:
        name: its canonical name.
        hosted: the name that `Shards.gather` gives it.
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
    copies: int = 1

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
class Unit:
    """Parameters that are gathered together, in one dtype."""

    pieces: tuple[Piece, ...]
    dtype: torch.dtype
    trained: bool


class Shards:
    """Gathers parameters and reduces their gradients, one collective for each unit, in plain operations.

    Args:
        units: in the order in which they are gathered.
        trained: the pieces that have gradients, in the order of the leaves.
        mesh: of the train step.
        reduce: the dtype in which gradients are sent.
    """

    def __init__(
        self, units: Sequence[Unit], trained: Sequence[Piece], mesh: Mesh, reduce: torch.dtype
    ) -> None:
        _register()
        self._axis = mesh["shard"]
        self._device = mesh.world.device
        self._replicas = None if mesh.gradient_size == self._axis.size else mesh.group("dp_replicate")
        self._reduce = reduce
        self._ranks = mesh.gradient_size
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
        self._loss_group = mesh.group("gradient")

    def gather(self) -> dict[str, torch.Tensor]:
        """All parameters whole, by their hosted names. No gradient flows through this."""
        whole: dict[str, torch.Tensor] = {}
        size = self._axis.size
        with torch.no_grad():
            for unit in self._units:
                pieces = [piece for piece in unit.pieces if piece.dim is not None]
                whole |= {p.hosted: p.local.to(unit.dtype) for p in unit.pieces if p.dim is None}
                if not pieces:
                    continue
                flat = torch.cat([_padded(piece) for piece in pieces]).to(self._device, unit.dtype)
                rows = _torch.all_gather_in_graph(flat, size, self._axis.group).view(size, -1)
                sizes = [piece.width for piece in pieces], [math.prod(piece.shape) for piece in pieces]
                copied = torch.ops.fnaccel.copied_parts if torch.compiler.is_compiling() else _copied_parts
                for piece, part in zip(pieces, copied(rows, *sizes), strict=True):
                    whole[piece.hosted] = piece.joined(part)
        return whole

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
            grad = (self._outgoing(grads[index]) / self._ranks).contiguous()
            if self._loss_group is not None:
                grad = _torch.end_collective(_torch.begin_all_reduce(grad, self._loss_group))
            averaged[index] = grad.to(piece.local.dtype)
        return averaged

    def _begin(self, unit: list[tuple[torch.Tensor, Piece]]) -> torch.Tensor:
        size = self._axis.size
        rows = [
            F.pad(piece.sliced(grad).reshape(-1), (0, size * piece.width - grad.numel())).view(size, -1)
            if size * piece.width > grad.numel()
            else piece.sliced(grad).reshape(size, -1)
            for grad, piece in unit
        ]
        flat = torch.cat(rows, dim=1).reshape(-1)
        return _torch.begin_reduce_scatter(self._outgoing(flat) / self._ranks, size, self._axis.group)

    def _outgoing(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(self._reduce) if grad.dtype in _NARROW else grad


def _padded(piece: Piece) -> torch.Tensor:
    flat = piece.sliced(piece.local).reshape(-1)
    missing = piece.width - flat.numel()
    return F.pad(flat, (0, missing)) if missing else flat


def _copied_parts(rows: torch.Tensor, widths: Sequence[int], elements: Sequence[int]) -> list[torch.Tensor]:
    """The columns of each parameter in memory of its own, flat and without what pads them."""
    parts = (part.clone(memory_format=torch.contiguous_format) for part in rows.split(widths, dim=1))
    return [part.view(-1)[:count] for part, count in zip(parts, elements, strict=True)]


@functools.cache
def _register() -> torch.library.Library:
    """Make the copies one operation of a graph. Inductor would read some parameters where they were gathered.

    Then what was gathered would live until the last use of a bias, which may be in backward.
    """
    library = torch.library.Library("fnaccel", "FRAGMENT")
    library.define("copied_parts(Tensor rows, int[] widths, int[] elements) -> Tensor[]")
    library.impl("copied_parts", _copied_parts, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "fnaccel::copied_parts", lambda rows, _, elements: [rows.new_empty(n) for n in elements], lib=library
    )
    return library


class WholeLeaves:
    """The whole parameters of one update, for a loss that takes them as values under FSDP2.

    The first use in an update gathers each unit once. Their gradients are those of this rank until `reduce`,
    which adds the averages to what FSDP2's own hooks have left in the shards.

    Args:
        built: modules that FSDP2 has sharded.
        leaves: the trained parameters.
        mesh: of the train step.
        reduce: the dtype in which gradients are sent.
        order: compares what ranks gather, in the first step.

    Attributes:
        held: the bytes that are whole at this moment. 0 if no loss has asked in this update.
        most: the largest `held` so far.
    """

    def __init__(
        self, built: Built, leaves: Sequence[Leaf], mesh: Mesh, reduce: torch.dtype, order: GatherOrder
    ) -> None:
        self._host, self._order, self._mesh = built.host, order, mesh
        self._named: dict[str, torch.Tensor] = dict(built.named("parameters"))
        units = _units_of(built, mesh)
        pieces = {piece.name: piece for unit in units for piece in unit.pieces}
        self._leaves = [leaf for leaf in leaves if leaf.name in pieces]
        self._shards = Shards(units, [pieces[leaf.name] for leaf in self._leaves], mesh, reduce)
        self._values: dict[str, torch.Tensor] = {}
        self._kept: list[weakref.ref[torch.Tensor]] = []  # of earlier updates: nobody should hold them
        self.held = self.most = 0

    def values(self) -> dict[str, torch.Tensor]:
        """All parameters whole, by canonical name, until the gradients of this update are reduced."""
        if not self.held:
            self._order.tell("all parameters for fa.params", "gathers")
            whole = self._shards.gather()
            for leaf in self._leaves:
                if leaf.param.requires_grad:  # not while the model is lent
                    whole[leaf.name].requires_grad_()
            self._values = self._named | whole
            self.held = sum(value.nbytes for value in whole.values()) or 1
            self.most = max(self.most, self.held)
        return self._values

    def ungathered(self) -> contextlib.AbstractContextManager[None]:
        """In the body FSDP2's own hooks gather nothing. A user's hooks stay."""
        return without_gathering(self._host)

    def reduce(self) -> None:
        """Add this update's gradients of the whole leaves, averaged over ranks, to those of the shards."""
        whole = [self._values[leaf.name] for leaf in self._leaves]
        grads = [value.grad for value in whole]
        self.drop()
        used = self._used_by_any(grads)
        averaged = self._shards.average(
            [
                torch.zeros_like(value) if grad is None else grad
                for value, grad in zip(whole, grads, strict=True)
            ]
        )
        for leaf, part, was in zip(self._leaves, averaged, used, strict=True):
            if was:
                part = part.to(leaf.shard.device)
                if leaf.param.grad is None:
                    leaf.param.grad = leaf.own(part.contiguous())
                else:
                    _torch.local_of(leaf.param.grad).add_(part)

    def drop(self) -> None:
        """Free the whole leaves, and their gradients."""
        self._kept = [ref for ref in self._kept if ref() is not None]
        if self.held:
            for leaf in self._leaves:
                value = self._values[leaf.name]
                value.grad = None
                self._kept.append(weakref.ref(value))
        self._values = {}
        self.held = 0

    def check_kept(self) -> None:
        """Raise StaleStateError if whole leaves of an earlier update got a gradient."""
        if any(value is not None and value.grad is not None for value in (ref() for ref in self._kept)):
            raise kept_values("the loss used parameters that fa.params gave in an earlier update")

    def _used_by_any(self, grads: Sequence[torch.Tensor | None]) -> list[bool]:
        """Which leaves have a gradient on some rank. An optimizer leaves the others alone."""
        group = self._mesh.group("gradient")
        used = [grad is not None for grad in grads]
        if group is None:
            return used
        seen = torch.tensor(used, dtype=torch.int32, device=self._mesh.world.device)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
        return [bool(each) for each in seen.tolist()]


def _units_of(built: Built, mesh: Mesh) -> list[Unit]:
    """What each unit of FSDP2 gathers, the root last."""
    names = {id(param): name for name, param in built.named("parameters")}
    size = mesh["shard"].size
    units: list[Unit] = []
    modules = [*built.host.modules()]
    for module in [*modules[1:], modules[0]]:
        state = getattr(module, "_get_fsdp_state", None)
        for group in () if state is None else shard_groups_of(state()):
            kinds: dict[tuple[torch.dtype, bool], list[Piece]] = {}
            for each in group.fsdp_params:
                param = each.sharded_param
                if id(param) not in names:  # a copy of another stage's
                    continue
                name, dim = names[id(param)], each.fsdp_placement.dim
                chunk = -(-param.shape[dim] // size)
                local = _torch.local_of(param).detach()
                piece = Piece(name, name, param, param.shape, dim, chunk, local, param.requires_grad)
                kinds.setdefault((param.dtype, param.requires_grad), []).append(piece)
            units += [Unit(tuple(pieces), dtype, trained) for (dtype, trained), pieces in kinds.items()]
    return units
