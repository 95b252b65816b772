"""The engine of a pipeline: that of the other axes, for the stages of this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn

from fnaccel import _torch
from fnaccel.collectives import gather_objects
from fnaccel.extend import (
    Build,
    Built,
    CapabilityError,
    Cut,
    Engine,
    Hooks,
    Leaf,
    Mesh,
    construct,
    engine_without,
    finisher,
    place,
    whole_engine,
)
from fnaccel.models.blocks import HasUnits, NamedUnits, find_units
from fnaccel.models.building import has_factories, share_first_values
from fnaccel.strategies.fsdp_engine import averager
from fnaccel.strategies.layout import copies_of
from fnaccel.strategies.pipeline.drawing import with_own_values
from fnaccel.strategies.pipeline.executor import Executor, Run
from fnaccel.strategies.pipeline.messages import Links
from fnaccel.strategies.pipeline.owned import AXIS, OnStage, Owned
from fnaccel.strategies.pipeline.passes import StagedModel
from fnaccel.strategies.pipeline.record import Pipeline
from fnaccel.strategies.pipeline.shared import SharedWeights, StageBuffers
from fnaccel.strategies.pipeline.split import Split, join


@attrs.define(eq=False)
class Parts:
    """What the split of a model has found, while it is put on stages.

    Attributes:
        split: the stages.
        elsewhere: the module, attribute, name, shape and dtype of each parameter of another stage.
    """

    split: Any = None
    elsewhere: list[tuple[nn.Module, str, str, torch.Size, torch.dtype]] = attrs.field(factory=list)


@finisher(Pipeline, around=True)
def build_pipeline(build: Build, axis: Pipeline) -> tuple[Engine, Built]:
    """The engine of a stage. One rank has the whole model, and runs it as one stage."""
    mesh, spec = build.spec.mesh, build.spec
    along = mesh[AXIS]
    if along.group is None:
        return engine_without(axis, build)
    parts = Parts()

    def prepare(built: Built) -> None:
        build.prepare(built)
        if built.prebuilt:
            everyone: Any = dist.group.WORLD
            share_first_values(built, everyone, mesh.world.device)
        cut_model(built, axis, build, parts)

    def own(model: nn.Module) -> set[int]:
        split = axis.split_of(model, along.size)
        named = dict(model.named_parameters(remove_duplicate=False))
        return {id(x) for n, x in named.items() if not x.dim() or split.home(n) == along.rank}

    if has_factories(spec.model):
        spec = attrs.evolve(spec, model=with_own_values(spec.model, own))
    inner = attrs.evolve(build, spec=spec, prepare=prepare)
    shards = "dp_shard" in mesh.degrees
    engine, built = engine_without(axis, inner) if shards else _replicas(inner)
    draws = spec.rng != "stream"
    staged, executor = on_stages(built.model, parts, engine.forward.run, mesh, axis.schedule, draws=draws)
    forward = attrs.evolve(
        engine.forward,
        run=executor.run,
        lend=_no_lending,
        drive=executor.drive,
        backward=executor.backward,
        whole=None,
        stages=along.size,
        nests=True,
    )
    shown = _shown_everywhere(engine, mesh, parts.split, built.cuts)
    leaves = tuple(_with_owner(leaf, shown[leaf.name], mesh) for leaf in engine.layout.leaves)
    layout = attrs.evolve(engine.layout, leaves=leaves, parameters=shown, copies=built.copies)
    weights = SharedWeights(built, parts.split.users, mesh)
    homes = {name: parts.split.home(name) for name, _ in built.model.named_buffers()}
    buffers = StageBuffers(built, homes, mesh, staged.moved)
    hooks = _hooks(engine.hooks, weights, buffers, leaves, mesh)
    return attrs.evolve(engine, layout=layout, forward=forward, hooks=hooks), built


def on_stages(
    model: nn.Module, parts: Parts, inner: Run, mesh: Mesh, schedule: str, *, draws: bool
) -> tuple[StagedModel, Executor]:
    """Let a model run as the stages of this rank.

    Args:
        model: with the values of these stages.
        parts: of the model.
        inner: `run(fn, *args)` of what is inside of a stage.
        mesh: the ranks.
        schedule: its name.
        draws: whether random streams are seeded for each micro-batch.
    """
    split, world = parts.split, mesh.world
    staged = StagedModel(model, split, parts.elsewhere, _buffers_outside(model, split), draws, world.device)
    executor = Executor(model, staged, inner, mesh[AXIS], split.homes, schedule, _links(mesh), world.abandon)
    return staged, executor


def _replicas(build: Build) -> tuple[Engine, Built]:
    """The engine of stages that are whole on each rank. Gradients are averaged after the last backward.

    torch's wrapper would average in each backward that it counts, and counts wrong if forwards run between.
    """
    built = construct(build.spec.model, build.seed)
    place(built, build)
    mesh = build.spec.mesh
    params = [p for p in built.host.parameters() if p.requires_grad and p.numel()]
    return whole_engine("pipeline", built, build, hooks=Hooks(finish=averager(params, mesh))), built


def cut_model(built: Built, axis: Pipeline, build: Build, parts: Parts) -> None:
    """Leave the parameters of this rank's stages in the modules, and none of the others' values."""
    mesh = build.spec.mesh
    along = mesh[AXIS]
    model: nn.Module = built.model
    split = axis.split_of(model, along.size)
    parts.split = split
    _note_units(built, split, build, along)
    slots: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for attribute, param in _torch.parameters_of(module).items():
            if param is not None:
                slots.setdefault(param, []).append((join(path, attribute), module, attribute))
    for param, places in slots.items():
        name = places[0][0]
        if not param.dim() or split.users[name][0] == along.rank:
            continue
        empty = without_rows(param, param.device if built.empty else "cpu")
        built.cuts.setdefault(name, Cut(shape=param.shape, axis=AXIS))
        for full, module, attribute in places:
            if split.home(full) == along.rank and full != name:
                built.copies[full] = name
                continue
            _torch.parameters_of(module)[attribute] = empty
            parts.elsewhere.append((module, attribute, full, param.shape, param.dtype))


def without_rows(param: nn.Parameter, device: torch.device | str) -> nn.Parameter:
    """What a module has in the place of a parameter of another stage."""
    rows = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=device)
    return nn.Parameter(rows, requires_grad=param.requires_grad)


def _buffers_outside(model: nn.Module, split: Split) -> list[tuple[str, nn.Module, str, int]]:
    """The name, module, attribute and stage of each buffer that is saved and part of no element."""
    transient = set(_torch.transient_buffers({None: model}))
    return [
        (name, module, attribute, split.names[name])
        for path, module in model.named_modules()
        for attribute in _torch.buffers_of(module)
        if (name := join(path, attribute)) not in transient and not split.inside(name)
    ]


def _note_units(built: Built, split: Split, build: Build, along: Any) -> None:
    """Let axes with units shard those of this rank's stages alone."""
    foreign = [element.path for element in split.elements if split.homes[element.stage] != along.rank]
    for axis in build.spec.strategy.axes:
        if isinstance(axis, HasUnits):
            for key, module in built.modules.items():
                found = find_units(module, built.units.get(key, axis.units), "fa.fsdp(units=...)")
                names = [
                    name
                    for name, _ in found
                    if not any(f"{name}.".startswith(f"{path}.") for path in foreign)
                ]
                built.units[key] = NamedUnits(tuple(names))


def _links(mesh: Mesh) -> Links:
    """Connections to other stages. On accelerators activations and gradients have a group each.

    There the operations of a group run in the order in which they were begun, and two stages begin theirs in
    different orders.
    """
    group: Any = mesh.group(AXIS)
    if mesh.world.device.type == "cpu":
        return Links(group, group, mesh.world.device)
    ranks = mesh.device.mesh.movedim(mesh.device.mesh_dim_names.index(AXIS), -1)
    back: Any = dist.new_subgroups_by_enumeration(ranks.reshape(-1, ranks.shape[-1]).tolist())[0]
    return Links(group, back, mesh.world.device)


def _no_lending(fn: Callable[..., Any], *args: Any) -> Any:  # noqa: ARG001 - as Forward has it
    raise CapabilityError(
        "a model on stages can't be lent: its forward waits for other ranks",
        where="given=",
        fix="fa.local(), fa.ddp() or fa.fsdp() for the model that is lent",
    )


def _shown_everywhere(engine: Engine, mesh: Mesh, split: Split, cuts: Mapping[str, Cut]) -> dict[str, Any]:
    """All parameters as states show them. Ranks of other stages learn how each lies on its own stage."""
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 - slow to import

    along = mesh[AXIS]
    dims = mesh.shown.mesh_dim_names
    own = {
        name: (value.shape, value.dtype, getattr(value, "placements", (Replicate(),) * len(dims)))
        for name, value in engine.layout.parameters.items()
        if split.users[name][0] == along.rank
    }
    found: dict[str, Any] = {}
    for each in gather_objects(own, over=along):
        found |= each
    shown: dict[str, Any] = {}
    for name, value in engine.layout.parameters.items():
        if name not in found:  # in a simulated world nobody answers
            found[name] = cuts[name].shape, value.dtype, (Replicate(),) * len(dims)
        shape, dtype, placements = found[name]
        if not shape:  # all stages have it
            shown[name] = value
            continue
        rank = split.users[name][0]
        placed = tuple(OnStage(rank) if dim == AXIS else at for dim, at in zip(dims, placements, strict=True))
        shown[name] = Owned.make(value if rank == along.rank else None, shape, dtype, mesh, placed)
    return shown


def _with_owner(leaf: Leaf, shown: Any, mesh: Mesh) -> Leaf:
    return attrs.evolve(leaf, shown=shown, copies=copies_of(mesh, shown))


def _hooks(
    hooks: Hooks, weights: SharedWeights, buffers: StageBuffers, leaves: Sequence[Leaf], mesh: Mesh
) -> Hooks:
    """The hooks of a stage around those of its engine."""
    foreign = [leaf.param for leaf in leaves if not leaf.shard.numel()]

    def finish() -> None:
        weights.add_gradients()
        if hooks.finish is not None:
            hooks.finish()
        for param in foreign:  # all ranks update the same names
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        buffers.share()

    def end() -> None:
        if hooks.end is not None:
            hooks.end()
        weights.send_values()

    def abandon(error: Exception) -> None:
        if hooks.abandon is not None:
            hooks.abandon(error)
        mesh.world.abandon(error)

    return attrs.evolve(hooks, finish=finish, end=end, abandon=abandon, told=Hooks().told)
