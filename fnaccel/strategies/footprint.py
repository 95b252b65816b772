"""The memory and the collectives of one rank under a strategy, from the shapes of a model. Nothing runs.

The layout is that of the engines: cuts of model axes first, then shards of `shard_dims`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import nn

from fnaccel import tree
from fnaccel.engine.updater import Updater, by_model
from fnaccel.errors import ArgumentError, CapabilityError, FnaccelError
from fnaccel.models.building import Built, construct, freeze, has_factories, release
from fnaccel.models.parameter import Cut, Leaf, Select
from fnaccel.models.unknown_values import without_memory
from fnaccel.optim.several import OptimizerLike
from fnaccel.strategies.ddp import Ddp
from fnaccel.strategies.fsdp import Fsdp
from fnaccel.strategies.shard_dims import owners_of, shard_dims
from fnaccel.strategies.strategy import Strategy, strategy
from fnaccel.texts import size_of
from fnaccel.world.mesh import LOSS_AXES, SHARD_AXES, ranks_along, resolve
from fnaccel.world.simulation import check_ranks


@attrs.frozen(kw_only=True)
class Placed:
    """A parameter on the rank with the largest part.

    Attributes:
        name: its canonical name.
        shape: of the whole parameter.
        cut: the shape that modules compute with, after model axes have cut it.
        part: the shape that this rank keeps.
        dim: the dimension that fsdp shards, None for a parameter that stays whole.
        dtype: its dtype.
        trained: whether it has a gradient.
        unit: the unit that fsdp gathers it with, "" for the root.
    """

    name: str
    shape: tuple[int, ...]
    cut: tuple[int, ...]
    part: tuple[int, ...]
    dim: int | None
    dtype: torch.dtype
    trained: bool
    unit: str

    def elsewhere(self) -> Placed:
        """The parameter on a rank that has other layers."""
        return attrs.evolve(self, cut=(0, *self.cut[1:]), part=(0, *self.part[1:]))

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """The bytes of one of its shapes."""
        return math.prod(shape) * self.dtype.itemsize


@attrs.frozen(kw_only=True)
class Traffic:
    """Collectives of one kind in a step.

    Attributes:
        axis: the mesh axis, or the derived axis, along which ranks talk.
        kind: of collective.
        count: how many.
        size: the bytes of all of them together, as this rank hands them over.
        per: the unit of `count` and `size`: "step", "micro-batch", "token" (`count` is for a micro-batch, and
            `size` for each of its tokens), or "attention", of which a forward has as many as it calls.
        what: the tensors.
    """

    axis: str
    kind: str
    count: int
    size: int
    per: str
    what: str

    def __str__(self) -> str:
        if self.per == "attention":
            return f"{self.kind} in each attention: {self.what}"
        if self.per == "token":
            return f"{self.count} {self.kind} a micro-batch, {size_of(self.size)} for each token: {self.what}"
        return f"{self.count} {self.kind} a {self.per}, {size_of(self.size)}: {self.what}"


@runtime_checkable
class CutsParameters(Protocol):
    """A model axis that cuts parameters."""

    def cuts(self, built: Built, size: int) -> Mapping[str, Cut]:
        """The cuts over `size` ranks, by canonical name. Changes nothing."""
        ...


@runtime_checkable
class Talks(Protocol):
    """A model axis whose ranks talk within a forward."""

    def traffic(self, built: Built, size: int) -> list[Traffic]:
        """The collectives of a micro-batch. Changes nothing."""
        ...


@runtime_checkable
class HasStages(Protocol):
    """An axis whose ranks have other layers."""

    def stages(self, built: Built, size: int) -> tuple[Mapping[str, int], tuple[str, ...]]:
        """The stages over `size` ranks. Changes nothing.

        Returns:
            By canonical name, the rank that keeps a parameter. One without dimensions is on all ranks. And a
            line of text for each stage.
        """
        ...


@runtime_checkable
class TrainsApart(Protocol):
    """An axis whose ranks train apart, and average after some steps."""

    mesh_axis: Any

    def held(self, parameters: int) -> int:
        """The bytes that a rank holds for it, by those of its trained parameters."""
        ...

    def averages_of(self, parameters: int, slots: int) -> list[Traffic]:
        """The collectives, as shares of a step, by the bytes of a rank's trained parameters and slots."""
        ...


@attrs.frozen(kw_only=True)
class Footprint:
    """The largest rank under a strategy. Print it.

    Attributes:
        layout: the strategy and its axes.
        placed: the parameters.
        slots: bytes of the optimizer's slots, or None if its slots are made by running it.
        traffic: the collectives.
        stages: a line for each stage of a pipeline.

    Example:
        >>> sizes = fa.strategies.footprint(GPT, "ddp(4)", 4)
        >>> print(sizes.traffic[-1])
        1 all_reduce a step, 16 B: the loss and its weight
    """

    layout: str
    placed: tuple[Placed, ...]
    slots: int | None
    traffic: tuple[Traffic, ...]
    stages: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Bytes of parameters."""
        return sum(each.bytes_of(each.part) for each in self.placed)

    @property
    def gradients(self) -> int:
        """Bytes of gradients after they were reduced."""
        return sum(each.bytes_of(each.part) for each in self.placed if each.trained)

    @property
    def largest_unit(self) -> int:
        """Bytes of the unit of fsdp with the most parameters, gathered. 0 without fsdp."""
        units: dict[str, int] = {}
        for each in self.placed:
            if each.part != each.cut:
                units[each.unit] = units.get(each.unit, 0) + each.bytes_of(each.cut)
        return max(units.values(), default=0)

    def __str__(self) -> str:
        whole = sum(each.bytes_of(each.shape) for each in self.placed)
        lines = [
            self.layout,
            f"  {sum(math.prod(each.shape) for each in self.placed):,} parameters, {size_of(whole)} in all",
            "  memory of the largest rank, without activations:",
            f"    parameters  {size_of(self.parameters)}",
            f"    gradients   {size_of(self.gradients)}",
            f"    optimizer   {'unknown' if self.slots is None else size_of(self.slots)}",
        ]
        if self.largest_unit:
            lines.append(f"    gathered    {size_of(self.largest_unit)} (the largest unit)")
        lines.append("  collectives:" if self.traffic else "  no collectives")
        lines += [f"    {each.axis:<13}{each}" for each in self.traffic]
        lines += [f"  {stage}" for stage in self.stages]
        units = dict.fromkeys(each.unit or "the root" for each in self.placed)
        if len(units) > 1:
            lines.append(f"  units: {', '.join(units)}")
        return "\n".join(lines)


def footprint(
    model: Callable[[], nn.Module] | Mapping[str, Callable[[], nn.Module]],
    over: str | Strategy,
    ranks: int,
    *,
    optimizer: OptimizerLike | None = None,
    frozen: tuple[Select, ...] = (),
) -> Footprint:
    """The memory and the collectives of a rank, for any number of ranks, without starting them.

    Parameters are built without values. Activations are not counted.

    Args:
        model: a factory, or a dict of factories.
        over: the strategy, or its text.
        ranks: how many ranks there would be.
        optimizer: a description such as `fa.adamw(3e-4)`, or a dict of them for a dict of models. Without one
            there are no slots.
        frozen: patterns, or functions `(name, parameter) -> bool`, of the parameters that are not trained.

    Raises:
        AxisProductError: the strategy does not fit the ranks.
        ArgumentError: a plan that does not fit the model, or a built module in the place of a factory.
        CapabilityError: a runtime such as DeepSpeed lays the model out itself.

    Example:
        >>> sizes = fa.strategies.footprint(GPT, "fsdp(8)", 8, optimizer=fa.adamw(3e-4))
        >>> sizes.slots == 2 * sizes.parameters
        True
    """
    check_ranks(ranks, "fa.strategies.footprint(ranks=)")
    axes = strategy(over)
    degrees = resolve(axes.degrees(), ranks, str(axes))
    if "dp_shard" in degrees and not any(isinstance(axis, Fsdp) for axis in axes.axes):
        raise CapabilityError(
            f"{axes} lays the model out itself, and its memory is not counted here",
            where="fa.strategies.footprint",
            fix="count fsdp, which holds as much as ZeRO-3: fa.fsdp()",
        )
    if not has_factories(dict(model) if isinstance(model, Mapping) else model):
        raise ArgumentError(
            "a built module was given", where="fa.strategies.footprint", fix="give its factory"
        )
    built = construct(dict(model) if isinstance(model, Mapping) else model, 0, empty=True)
    try:
        freeze(built, frozen)
        return footprint_of(built, axes, degrees, optimizer, f"{axes}: {_axes(degrees, ranks)}")
    finally:
        release(built)


def _axes(degrees: Mapping[str, int], ranks: int) -> str:
    listed = "".join(f", {name}={degree}" for name, degree in degrees.items())
    return f"{ranks} rank{'s' if ranks > 1 else ''}{listed}"


def footprint_of(
    built: Built,
    axes: Strategy,
    degrees: Mapping[str, int],
    optimizer: object,
    layout: str,
    *,
    home: int | None = None,
) -> Footprint:
    """The footprint of modules that are built already, whole and without values. Changes nothing.

    Args:
        built: the modules.
        axes: the strategy.
        degrees: the ranks along each axis.
        optimizer: as for `footprint`.
        layout: the first line of its text.
        home: the rank along an axis of stages. None: the one with the most parameters.
    """
    cuts: dict[str, Cut] = {}
    talks: list[Traffic] = []
    away, lines = frozenset[str](), tuple[str, ...]()
    for axis in axes.axes:
        size = degrees.get(axis.mesh_axis, 1)
        if isinstance(axis, CutsParameters) and size > 1:
            cuts.update(axis.cuts(built, size))
        if isinstance(axis, Talks) and size > 1:
            talks += axis.traffic(built, size)
        if isinstance(axis, HasStages) and size > 1:
            homes, lines = axis.stages(built, size)
            away = _away(built, homes, home)
    fsdp = next((axis for axis in axes.axes if isinstance(axis, Fsdp)), None)
    dims = {} if fsdp is None else shard_dims(built, degrees, fsdp, cuts)
    owners = {} if fsdp is None else owners_of(built, fsdp)
    placed = tuple(
        _placed(name, param, cuts.get(name), degrees, dims.get(name), owners.get(id(param), (0, ""))[1])
        for name, param in built.named("parameters")
    )
    placed = tuple(each.elsewhere() if each.name in away else each for each in placed)
    slots = 0 if optimizer is None else _slots_of(built, placed, optimizer)
    held, trained = slots, sum(each.bytes_of(each.part) for each in placed if each.trained)
    for axis in axes.axes:
        if isinstance(axis, TrainsApart) and slots is not None:
            held = slots + axis.held(trained)
            talks += axis.averages_of(trained, slots) if degrees[axis.mesh_axis] > 1 else []
    traffic = (*talks, *_data_parallel(placed, axes, degrees, fsdp))
    return Footprint(layout=layout, placed=placed, slots=held, traffic=traffic, stages=lines)


def _away(built: Built, homes: Mapping[str, int], home: int | None) -> frozenset[str]:
    """The names of the parameters that a rank does not keep. By default that with the largest part."""
    sizes = dict.fromkeys(homes.values(), 0)
    named = dict(built.named("parameters"))
    for name, param in named.items():
        sizes[homes[name]] += param.nbytes
    own = max(sizes, key=lambda each: sizes[each]) if home is None else home
    return frozenset(name for name, param in named.items() if param.dim() and homes[name] != own)


def _placed(
    name: str, param: Any, cut: Cut | None, degrees: Mapping[str, int], dim: int | None, unit: str
) -> Placed:
    local = tuple(param.shape) if cut is None else cut.part_shape(degrees[cut.axis])
    part = list(local)
    if dim is not None:
        part[dim] = -(-part[dim] // ranks_along(degrees, SHARD_AXES))
    return Placed(
        name=name,
        shape=tuple(param.shape),
        cut=local,
        part=tuple(part),
        dim=dim,
        dtype=param.dtype,
        trained=param.requires_grad,
        unit=unit,
    )


def _slots_of(built: Built, placed: tuple[Placed, ...], optimizer: object) -> int | None:
    """The bytes of an optimizer's slots on the rank: it makes them over tensors without memory.

    Optimizers of torch make theirs by a first step, which reads values on the CPU.
    """
    optimizers = by_model(optimizer, list(built.modules))
    with without_memory():
        leaves = [
            Leaf(each.name, param, param.detach(), param)
            for each in placed
            if each.trained
            for param in (nn.Parameter(torch.empty(each.part, dtype=each.dtype)),)
        ]
        try:
            updater = Updater(leaves, optimizers, torch.device("cpu"), on_device=False)
        except FnaccelError:
            raise
        except Exception:
            return None
        tensors = [value for value in tree.leaves(updater.slots) if isinstance(value, torch.Tensor)]
    return sum(value.numel() * value.element_size() for value in tensors)


def _data_parallel(
    placed: tuple[Placed, ...], axes: Strategy, degrees: Mapping[str, int], fsdp: Fsdp | None
) -> list[Traffic]:
    placed = tuple(each for each in placed if math.prod(each.part))
    trained = [each for each in placed if each.trained]
    grads = sum(each.bytes_of(each.part) for each in trained)
    averaging = [axis for axis in LOSS_AXES if axis not in axes.apart()]
    over = "gradient" if axes.apart() else "loss"
    if fsdp is None:
        if ranks_along(degrees, averaging) == 1:
            return [] if ranks_along(degrees, LOSS_AXES) == 1 else _report(axes)
        ddp = next((axis for axis in axes.axes if isinstance(axis, Ddp)), Ddp())
        count = _buckets(trained, *ddp.bucket_sizes(grads))
        return [
            Traffic(axis=over, kind="all_reduce", count=count, size=grads, per="step", what="gradients"),
            *_report(axes),
        ]
    whole = sum(each.bytes_of(each.part) for each in trained if each.dim is None)
    placed = tuple(each for each in placed if each.dim is not None)
    units = {each.unit for each in placed}
    # backward gathers all units again but the root, which stays
    again = units - {""} if fsdp.reshard_after_forward else set[str]()
    gathered = sum(each.bytes_of(each.cut) * (2 if each.unit in again else 1) for each in placed)
    rows = [
        Traffic(
            axis="shard", kind="all_gather", count=len(units) + len(again), size=gathered, per="micro-batch",
            what="parameters, in forward and backward" if fsdp.reshard_after_forward else "parameters",
        ),
        Traffic(
            axis="shard", kind="reduce_scatter", count=len(units), per="step", what="gradients",
            size=sum(each.bytes_of(each.cut) for each in placed if each.trained),
        ),
    ]  # fmt: skip
    if degrees.get("dp_replicate", 1) > 1 and "dp_replicate" in averaging:
        rows.append(
            Traffic(
                axis="dp_replicate", kind="all_reduce", count=len(units), size=grads - whole, per="step",
                what="gradients of shards",
            )
        )  # fmt: skip
    if whole:
        what = "the gradients of whole parameters"
        rows.append(Traffic(axis=over, kind="all_reduce", count=1, size=whole, per="step", what=what))
    return [*rows, *_report(axes)]


def _buckets(trained: list[Placed], limit: float, others: float) -> int:
    """How many buckets torch's reducer makes: one is full as soon as it has that many bytes."""
    filled: dict[torch.dtype, int] = {}
    count = 0
    for each in reversed(trained):
        filled[each.dtype] = filled.get(each.dtype, 0) + each.bytes_of(each.part)
        if filled[each.dtype] >= limit:
            filled[each.dtype] = 0
            count += 1
            limit = others
    return count + sum(size > 0 for size in filled.values())


def _report(axes: Strategy) -> list[Traffic]:
    if any(axis.metrics == "boundary" for axis in axes.axes):
        return []  # a part of the averages
    what = "the loss and its weight"
    return [Traffic(axis="loss", kind="all_reduce", count=1, size=16, per="step", what=what)]
