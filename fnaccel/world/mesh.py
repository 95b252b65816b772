"""Axis arithmetic: from the degrees of a strategy and a number of ranks to a mesh of ranks.

Axes are named as torchtitan names them. Seven are derived. Rows are split over `batch`: `dp_replicate` and
`dp_shard` together. With `cp`, along which ranks have parts of each sequence, they are `loss`: weights are
added over it. Gradients are averaged over `gradient`, which is `loss` but for axes whose ranks train apart.
`dp_shard` and `cp` are `shard`, for parameters. With `tp`, along which parameters are cut, and `pp`, along
which ranks have other layers, they are `model`: its ranks together hold the whole model, in parts. `loss`
with `pp` is `totals`, over which the totals of an update are added, and `replica` is that but for axes whose
ranks train apart.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fnaccel import _torch
from fnaccel.errors import AxisProductError
from fnaccel.world._torch import layouts_on
from fnaccel.world.world import World

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
"""Mesh axes, outermost first."""

BATCH_AXES = ("dp_replicate", "dp_shard")
"""The axes over which the rows of a batch are split."""

LOSS_AXES = (*BATCH_AXES, "cp")
"""The axes over which the loss of a batch is split: ranks along them compute other parts of it."""

SHARD_AXES = ("dp_shard", "cp")
"""The axes over which parameters are sharded: ranks with parts of one sequence share the shards, too."""

TOTAL_AXES = ("pp", *LOSS_AXES)
"""The axes over which ranks share the totals of an update: stages without a loss have none of their own."""

MODEL_AXES = ("pp", *SHARD_AXES, "tp")
"""The axes along which ranks may hold different parts of the model."""

DERIVED = {
    "batch": BATCH_AXES,
    "loss": LOSS_AXES,
    "totals": TOTAL_AXES,
    "replica": TOTAL_AXES,
    "gradient": LOSS_AXES,
    "shard": SHARD_AXES,
    "model": MODEL_AXES,
}
"""Names that stand for several axes together. `Mesh.axes_of` leaves axes that train apart out of two."""

_WITHIN = ("gradient", "replica")
"""Those two."""


def resolve(degrees: Sequence[tuple[str, int]], size: int, described: str) -> dict[str, int]:
    """Fill in the one degree of -1 and check that the product is `size`.

    Args:
        degrees: (axis name, degree) pairs.
        size: the number of ranks.
        described: how the user wrote the strategy, for the message.

    Raises:
        AxisProductError: the product can't be `size`. Shows the arithmetic and degrees that fit.
    """
    names = [name for name, _ in degrees]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise AxisProductError(
            f"axis {repeated[0]!r} stands twice in {described}",
            where=f"strategy {described}",
            fix="multiply the two degrees into one axis",
        )
    for name, degree in degrees:
        if type(degree) is not int or (
            degree < 1 and degree != -1
        ):  # an axis of the user's own is not checked
            raise AxisProductError(
                f"the axis {name} can't have degree {degree!r}",
                where=f"strategy {described}",
                fix="a whole number from 1 on, or -1 for the ranks that are left",
            )
    free = [name for name, degree in degrees if degree == -1]
    fixed = math.prod(degree for _, degree in degrees if degree != -1)
    arithmetic = " * ".join(str(degree) for _, degree in degrees) or "1"
    if len(free) > 1 or size % fixed or (not free and fixed != size):
        raise AxisProductError(
            f"{described} is {arithmetic} = {fixed if not free else '?'} ranks, and the world has {size}",
            where=f"strategy {described}",
            fix=_suggest(degrees, size),
        )
    return {name: size // fixed if degree == -1 else degree for name, degree in degrees}


def batch_ranks(degrees: Sequence[tuple[str, int]], size: int, described: str) -> int:
    """The number of parts of a batch's rows under a strategy. Arguments as for `resolve`.

    Raises:
        AxisProductError: the strategy does not fit.
    """
    resolved = resolve(degrees, size, described)
    return ranks_along(resolved, BATCH_AXES)


def _suggest(degrees: Sequence[tuple[str, int]], size: int) -> str:
    if not degrees:
        return f"start one process, or distribute over {size} with ddp() or fsdp()"
    if len(degrees) == 1:
        return f"use degree {size}, or -1 for all ranks, or start {abs(degrees[0][1])} processes"
    wanted = [degree for _, degree in degrees]

    def distance(layout: Sequence[int]) -> tuple[float, Sequence[int]]:
        pairs = [(have, want) for have, want in zip(layout, wanted, strict=True) if want > 0]
        return sum(abs(math.log(have / want)) for have, want in pairs), layout

    nearest = sorted(_layouts(size, len(degrees)), key=distance)[:3]
    shown = (
        " * ".join(f"{name}={degree}" for (name, _), degree in zip(degrees, layout, strict=True))
        for layout in nearest
    )
    return f"nearest layouts of {size} ranks: {', '.join(shown)}"


def _layouts(size: int, axes: int) -> list[tuple[int, ...]]:
    """All degrees of that many axes whose product is `size`."""
    if axes == 1:
        return [(size,)]
    divisors = [degree for degree in range(1, size + 1) if size % degree == 0]
    return [(degree, *rest) for degree in divisors for rest in _layouts(size // degree, axes - 1)]


def ranks_along(degrees: Mapping[str, int], axes: Sequence[str]) -> int:
    """The number of ranks along several axes together."""
    return math.prod(degrees.get(axis, 1) for axis in axes)


@attrs.frozen(kw_only=True)
class MeshAxis:
    """One axis of a mesh, as `over=` takes it. `group` is None if the axis has one rank."""

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup | None = attrs.field(eq=False, repr=False)


@attrs.frozen(kw_only=True)
class Mesh:
    """Ranks laid out over named axes.

    Attributes:
        world: the ranks.
        degrees: the number of ranks along each axis.
        device: torch's DeviceMesh of these axes, or None without axes. `tp` is its first dimension, since
            parameters are cut over `tp` first, and their parts are sharded. Ranks along `tp` are neighbours.
        shown: the DeviceMesh of the tensors in states: the same, with `dp_shard` and `cp` as one axis.
        model: the group of the derived axis `model`, if no other group is the same.
        apart: the axes whose ranks train apart: their gradients are not averaged.
        batch_size: how many parts the rows of a batch are split in.
        loss_size: how many parts the loss is split in.
        gradient_size: over how many ranks gradients are averaged.

    Example, on 2 ranks:
        >>> train_step = fa.train_step(loss_fn, model=fa.distribute(GPT, "hsdp(2, 1)"), optimizer=fa.sgd(0.1))
        >>> train_step.mesh["batch"].size
        2
    """

    world: World
    degrees: dict[str, int] = attrs.field(eq=lambda degrees: tuple(degrees.items()))
    device: Any = attrs.field(default=None, eq=False, repr=False)
    shown: Any = attrs.field(default=None, eq=False, repr=False)
    model: dist.ProcessGroup | None = attrs.field(default=None, eq=False, repr=False)
    apart: tuple[str, ...] = ()
    batch_size: int = attrs.field(
        default=attrs.Factory(lambda mesh: ranks_along(mesh.degrees, BATCH_AXES), takes_self=True),
        init=False,
        repr=False,
    )
    loss_size: int = attrs.field(
        default=attrs.Factory(lambda mesh: ranks_along(mesh.degrees, LOSS_AXES), takes_self=True),
        init=False,
        repr=False,
    )
    gradient_size: int = attrs.field(
        default=attrs.Factory(
            lambda mesh: ranks_along(mesh.degrees, mesh.axes_of("gradient")), takes_self=True
        ),
        init=False,
        repr=False,
    )

    @property
    def batch_rank(self) -> int:
        """Which of those parts is this rank's."""
        return self._rank(BATCH_AXES)

    @property
    def loss_rank(self) -> int:
        """Which of those parts is this rank's. Ranks with other parts draw other random numbers."""
        return self._rank(LOSS_AXES)

    @property
    def shard_dim(self) -> str:
        """The dimension of `shown` along which parameters are sharded: `dp_shard`, or `dp_shard_cp`."""
        return next(name for name in self.shown.mesh_dim_names if name.startswith("dp_shard"))

    @property
    def partial_rows(self) -> bool:
        """Whether several ranks compute parts of the loss of one row, as along `cp`."""
        return self.loss_size != self.batch_size

    @property
    def replicas_apart(self) -> bool:
        """Whether there are several replicas, which train apart."""
        return self.gradient_size != self.loss_size

    def axes_of(self, axis: str) -> tuple[str, ...] | None:
        """The axes that a derived name stands for. None if it is none."""
        axes = DERIVED.get(axis)
        return tuple(x for x in axes if x not in self.apart) if axis in _WITHIN and axes else axes

    def _rank(self, axes: Sequence[str]) -> int:
        rank = 0
        if self.world.size == 1:
            return rank
        for axis in axes:
            if axis in self.degrees:
                rank = rank * self.degrees[axis] + self.coordinate(axis)
        return rank

    def coordinate(self, axis: str) -> int:
        """The coordinate of this rank along one axis. 0 along an axis that the mesh lacks."""
        if axis not in self.degrees or self.device is None:
            return 0
        return int(self.device.get_local_rank(axis))

    def __getitem__(self, axis: str) -> MeshAxis:
        """One axis (or `"batch"`, or `"loss"`), for `fa.gather(x, over=train_step.mesh["dp_shard"])`."""
        group, derived = self.group(axis), self.axes_of(axis)
        return MeshAxis(
            name=axis,
            size=self.degrees[axis] if derived is None else ranks_along(self.degrees, derived),
            rank=self.coordinate(axis) if derived is None else self._rank(derived),
            group=group,
        )

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group along one axis, or along a derived axis: `"batch"` or `"loss"`.

        None if that axis has one rank.

        Raises:
            AxisProductError: there is no such axis.
        """
        if axis in DERIVED and self.world.size == 1:  # at once, since each step asks
            return None
        derived = self.axes_of(axis)
        if derived is not None:
            size = ranks_along(self.degrees, derived)
            if size == 1:
                return None
            if size == self.world.size:
                return dist.group.WORLD
            if axis == "model" and self.model is not None:
                return self.model
            order = self.device.mesh_dim_names
            names = tuple(name for name in order if name in derived and self.degrees[name] > 1)
            if _joined(names) in self.shown.mesh_dim_names:
                return self.shown.get_group(_joined(names))
            if len(names) == 1:
                return self.device.get_group(names[0])
            return self.device[names]._flatten(_joined(names)).get_group()  # noqa: SLF001
        if axis not in self.degrees:
            raise AxisProductError(
                f"the mesh has no axis {axis!r}",
                where=f"mesh {self.degrees}",
                fix=f"choose one of: {', '.join([*self.degrees, *DERIVED])}",
            )
        return None if self.degrees[axis] == 1 else self.device.get_group(axis)


def build(
    world: World,
    degrees: Mapping[str, int],
    follows: Mapping[str, str] | None = None,
    apart: tuple[str, ...] = (),
) -> Mesh:
    """Lay the ranks of `world` out over axes, ordered as `AXES`, outermost first.

    Args:
        world: the ranks.
        degrees: the number of ranks along each axis.
        follows: for each axis outside `AXES`, the axis before it, or "" for the outermost.
        apart: the axes whose ranks train apart.

    Raises:
        AxisProductError: an axis that is none of `AXES` and follows none.
    """
    order: list[str] = [*AXES]
    for name, before in (follows or {}).items():
        if before and before not in order:
            raise AxisProductError(
                f"axis {name!r} follows {before!r}, which is no axis of a mesh",
                where=f"mesh {dict(degrees)}",
                fix=f"choose one of: {', '.join(order)}",
            )
        order.insert(order.index(before) + 1 if before else 0, name)
    unknown = [name for name in degrees if name not in order]
    if unknown:
        raise AxisProductError(
            f"a mesh has no axis {unknown[0]!r}",
            where=f"mesh {dict(degrees)}",
            fix=f"choose one of: {', '.join(order)}. Or name the axis that it follows",
        )
    ordered = {name: degrees[name] for name in order if name in degrees}
    if not ordered:
        return Mesh(world=world, degrees={}, apart=apart)
    ensure_group(world)
    laid = _shared_layout(world, ordered)
    return Mesh(
        world=world, degrees=ordered, device=laid.device, shown=laid.shown, model=laid.model, apart=apart
    )


@attrs.frozen
class _Layout:
    """The process groups of a mesh."""

    device: Any
    shown: Any
    model: dist.ProcessGroup | None


def _shared_layout(world: World, degrees: dict[str, int]) -> _Layout:
    """The layout of all meshes with these degrees. Each has process groups, with threads and connections.

    Ranks agree whether they have one already: a rank may have failed while it made the last one.
    """
    layouts, key = layouts_on(dist.group.WORLD), (world.device, tuple(degrees.items()))
    present = torch.tensor(float(key in layouts), device=world.device)
    if world.size > 1:
        dist.all_reduce(present, dist.ReduceOp.MIN)
    if not bool(present):
        layouts[key] = _lay_out(world, degrees)
    return layouts[key]


def _lay_out(world: World, degrees: dict[str, int]) -> _Layout:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: PLC0415 - slow to import

    def laid_out(axes: Mapping[str, int]) -> Any:
        names = tuple(axes)
        if "tp" not in names[1:]:
            return init_device_mesh(world.device.type, tuple(axes.values()), mesh_dim_names=names)
        ranks = torch.arange(world.size).view(tuple(axes.values())).movedim(names.index("tp"), 0)
        first = ("tp", *(name for name in names if name != "tp"))
        return DeviceMesh(world.device.type, ranks, mesh_dim_names=first)

    device = laid_out(degrees)
    sharing = tuple(name for name in degrees if name in SHARD_AXES)
    if len(sharing) < 2:
        return _Layout(device, device, _model_group(world, degrees))
    shards = math.prod(degrees[name] for name in sharing)
    first = sharing[0]
    merged = {
        _joined(sharing) if name == first else name: shards if name == first else degree
        for name, degree in degrees.items()
        if name not in sharing[1:]
    }
    return _Layout(device, laid_out(merged), _model_group(world, degrees))


def _model_group(world: World, degrees: Mapping[str, int]) -> dist.ProcessGroup | None:
    """The group of the axis `model`, if `tp` and shards make it, and others do, too.

    DTensor takes a flattened mesh for a gather over its axes. With `tp` first it would join parts in a wrong
    order (2.13). So the group is made beside the mesh.
    """
    within = [number for number, name in enumerate(degrees) if name in MODEL_AXES]
    size = math.prod(list(degrees.values())[number] for number in within)
    if "tp" in degrees and size > degrees["tp"]:
        logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_not_of_flattening)
    if "tp" not in degrees or size in (degrees["tp"], world.size):
        return None
    ranks = torch.arange(world.size).view(tuple(degrees.values()))
    rows = ranks.movedim(within, list(range(-len(within), 0))).reshape(-1, size)
    own: Any = dist.new_subgroups_by_enumeration(rows.tolist())[0]
    return own


def _not_of_flattening(record: logging.LogRecord) -> bool:
    """Drop torch's advice to flatten the two axes, which would give wrong values."""
    return "sequential all_gather operations" not in record.getMessage()


def _joined(names: Sequence[str]) -> str:
    return "_".join(names)


def ensure_group(world: World) -> None:
    """Begin a process group of one rank if a single process needs a mesh and no group runs."""
    if not dist.is_initialized():
        backend = dist.Backend.default_device_backend_map.get(world.device.type, "gloo")
        dist.init_process_group(backend, store=_torch.HashStore(), rank=0, world_size=1)
