"""Which dimension of each parameter fsdp shards, and which unit gathers it: for engines, plans and estimates.

The dimension is the first one, since FSDP2 copies a parameter once more for a shard along another one. But
ranks without rows hold nothing of a parameter, and its padding is gathered and stored by the first ranks.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from fnaccel.errors import ArgumentError, nearest
from fnaccel.models._torch import Norm
from fnaccel.models.blocks import find_units
from fnaccel.models.building import Built, Host
from fnaccel.models.note import Note, count_of
from fnaccel.models.parameter import Cut
from fnaccel.strategies.fsdp import Fsdp
from fnaccel.strategies.strategy import Pairs
from fnaccel.texts import first_of
from fnaccel.world.mesh import SHARD_AXES, ranks_along

_PADDING = 0.25
"""Rows of padding for each row, from which another dimension is looked for."""
_SAVED = 0.01
"""Memory that another dimension has to save, as a part of that of a rank's parameters."""


def shard_dims(
    built: Built, degrees: Mapping[str, int], options: Fsdp, cuts: Mapping[str, Cut] | None = None
) -> dict[str, int | None]:
    """The dimension along which fsdp shards each parameter, by canonical name. None: it stays whole.

    The weights of experts, which have three dimensions, take the first dimension that divides. Others leave
    dimension 0 if its padding is a quarter of it or more, and if all parameters of this shape together save
    1 % of the parameters of the fullest rank. All stay if parameters are sharded over fewer ranks after
    forward, which FSDP2 can do along dimension 0 only.

    Parameters of batch norms and instance norms stay whole: their kernels take no weights that were gathered
    in bf16 beside running statistics in fp32. A unit for each would take three collectives instead.

    Args:
        built: the modules.
        degrees: the ranks along each axis of the mesh.
        options: the axis. Its `dims` and `ignore` count before all of this.
        cuts: how model axes cut parameters. By default, as they have cut these.

    Raises:
        ArgumentError: see `fsdp`.
    """
    shards = ranks_along(degrees, SHARD_AXES)
    cuts = built.cuts if cuts is None else cuts
    named = dict(built.named("parameters"))
    shapes = {
        # the largest rank's part, since all ranks have to choose alike
        name: tuple(param.shape) if name not in cuts else cuts[name].part_shape(degrees[cuts[name].axis])
        for name, param in named.items()
    }
    norms = _parameters_of(built, Norm)
    dims = {
        name: None if id(named[name]) in norms else _first_dim(shape, cuts.get(name), shards)
        for name, shape in shapes.items()
    }
    bytes_of = {name: param.dtype.itemsize for name, param in named.items()}
    total = sum(_part(shapes[name], dim, shards) * bytes_of[name] for name, dim in dims.items())
    others = {
        name: dim
        for name, shape in shapes.items()
        if isinstance(options.reshard_after_forward, bool)
        and dims[name] == 0
        and (dim := _other_dim(shape, cuts.get(name), shards)) is not None
    }
    saved: dict[tuple[int, ...], float] = {}
    for name, dim in others.items():
        shape = shapes[name]
        less = _part(shape, 0, shards) - _part(shape, dim, shards)
        saved[shape] = saved.get(shape, 0) + less * bytes_of[name]
    kernels = _parameters_of(built, nn.Conv1d, nn.ConvTranspose1d)  # they have three dimensions as well
    for name, dim in others.items():
        shape = shapes[name]
        experts = len(shape) == 3 and shape[0] > 1 and id(named[name]) not in kernels
        padding = -shape[0] % shards / shape[0]
        if experts or (padding >= _PADDING and saved[shape] > _SAVED * total):
            dims[name] = dim
    dims |= _asked_dims(options.dims, shapes, cuts, shards)
    dims |= dict.fromkeys(_ignored(options.ignore, named))
    dims |= {copy: dims[name] for copy, name in built.copies.items()}
    return dims | dict.fromkeys(name for name, param in named.items() if not param.numel())


def owners_of(built: Built, options: Fsdp) -> dict[int, tuple[int, str]]:
    """The position and the name of the innermost unit of each parameter, by its id. The root is last, and "".

    Args:
        built: the modules, whose `units` count before those of the axis.
        options: the axis.
    """
    units = [
        (name if key is None else f"{key}/{name}", unit)
        for key, module in built.modules.items()
        for name, unit in find_units(module, built.units.get(key, options.units), "fa.fsdp(units=...)")
    ]
    owners: dict[int, tuple[int, str]] = {}
    for position, (name, unit) in reversed(list(enumerate(units))):
        for param in unit.parameters():
            owners.setdefault(id(param), (position, name))
    return {id(param): owners.get(id(param), (len(units), "")) for _, param in built.named("parameters")}


def _ignored(patterns: Sequence[str], names: Collection[str]) -> list[str]:
    """The names of the parameters that match a pattern of `ignore`.

    Raises:
        ArgumentError: a pattern matches nothing.
    """
    matches = [fnmatch.filter(names, pattern) for pattern in patterns]
    for pattern, found in zip(patterns, matches, strict=True):
        if not found:
            raise ArgumentError(
                f"the pattern {pattern!r} matches no parameter",
                where="fa.fsdp(ignore=...)",
                fix=nearest(pattern, names),
            )
    return [name for found in matches for name in found]


def _asked_dims(
    asked: Pairs, shapes: Mapping[str, Sequence[int]], cuts: Mapping[str, Cut], shards: int
) -> dict[str, int]:
    """The dimensions that the user asked for, by name.

    Raises:
        ArgumentError: a pattern matches nothing, or a parameter can't be sharded along its dimension.
    """
    where = "fa.fsdp(dims=)"
    dims: dict[str, int] = {}
    for pattern, dim in asked:
        names = fnmatch.filter(shapes, pattern)
        if not names:
            raise ArgumentError(
                f"the pattern {pattern!r} matches no parameter", where=where, fix=nearest(pattern, shapes)
            )
        for name in names:
            problem = _unfit(tuple(shapes[name]), dim, cuts.get(name), shards)
            if problem and name not in dims:
                raise ArgumentError(
                    f"{name} {problem}", where=where, fix="another dimension, or a pattern that leaves it out"
                )
            dims.setdefault(name, dim)
    return dims


def _unfit(shape: tuple[int, ...], dim: int, cut: Cut | None, shards: int) -> str:
    """The reason why FSDP2 can't shard a parameter along a dimension, or ""."""
    if dim >= len(shape) or 0 in shape:
        return f"has the shape {list(shape)}, without elements along a dimension {dim}"
    if dim and shape[dim] % shards:
        return f"has {shape[dim]} elements along dimension {dim}, which {shards} ranks do not divide"
    if cut is not None and cut.dim == dim and cut.matrices > 1:
        return f"has {cut.matrices} matrices side by side along dimension {dim}"
    return ""


def shard_notes(
    modules: Mapping[str | None, nn.Module], degrees: Mapping[str, int], options: Fsdp
) -> list[Note]:
    """What a plan says of parameters whose rows the ranks do not divide.

    Args:
        modules: the modules by key, which no model axis cuts.
        degrees: the ranks along each axis of the mesh.
        options: the axis.
    """
    shards = ranks_along(degrees, SHARD_AXES)
    if shards == 1:
        return []
    built = Built(model=None, modules=dict(modules), host=Host({}))
    named = dict(built.named("parameters"))
    dims = shard_dims(built, degrees, options)
    asked = [name for pattern, _ in options.dims for name in fnmatch.filter(named, pattern)]
    padding = {
        name: -param.shape[0] % shards / param.shape[0] for name, param in named.items() if dims[name] == 0
    }
    moved = [name for name, dim in dims.items() if dim and name not in asked]
    uneven = [name for name, part in padding.items() if part >= _PADDING and named[name].dim() > 1]
    why = f"fsdp: {shards} ranks do not divide the rows of"
    norms = [part for module in modules.values() for part in module.modules() if isinstance(part, Norm)]
    stay = "parameters stay whole on each rank, and compute in their own dtype"
    notes = [Note(f"fsdp: {count_of(norms)}: {stay}")] if norms else []
    notes += [Note(f"{why} {first_of(moved)}: sharded along another dimension")] if moved else []
    return [*notes, *([Note(f"{why} {first_of(uneven)}: the last ranks hold less")] if uneven else [])]


def _first_dim(shape: Sequence[int], cut: Cut | None, shards: int) -> int | None:
    """Dimension 0, except for packed matrices: shards of their rows would be rows of several matrices.

    A scalar, and a parameter without elements, stay whole: FSDP2 takes none.
    """
    if not shape or 0 in shape:
        return None
    if cut is None or cut.dim != 0 or cut.matrices == 1:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % shards == 0), None)


def _other_dim(shape: Sequence[int], cut: Cut | None, shards: int) -> int | None:
    """The first other dimension that divides, if dimension 0 does not."""
    if shape[0] % shards == 0:
        return None
    free = (dim for dim in range(1, len(shape)) if cut is None or dim != cut.dim)
    return next((dim for dim in free if shape[dim] % shards == 0), None)


def _part(shape: Sequence[int], dim: int | None, shards: int) -> int:
    """The elements of the fullest rank."""
    if dim is None:
        return math.prod(shape)
    return -(-shape[dim] // shards) * math.prod(size for at, size in enumerate(shape) if at != dim)


def _parameters_of(built: Built, *kinds: type[nn.Module]) -> set[int]:
    """The ids of the parameters that modules of these classes own."""
    return {
        id(param)
        for module in built.modules.values()
        for part in module.modules()
        if isinstance(part, kinds)
        for param in part.parameters(recurse=False)
    }
