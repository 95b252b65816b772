"""The engine of `fsdp`: torch's FSDP2 (`fully_shard`) on each unit and on the host module.

A parameter of a unit is whole inside that unit's forward. One of no unit belongs to the host, the root, and
is whole during all of the loss function, which may call any method of the model.
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn

from fnaccel import _lazy, _torch, tree
from fnaccel.engine.engine import Engine, Forward, Hooks, Layout
from fnaccel.errors import ArgumentError, CapabilityError, FnaccelError
from fnaccel.models.blocks import find_units
from fnaccel.models.building import Built, construct, has_factories, share_first_values
from fnaccel.models.gradient_hooks import check_hooks_run
from fnaccel.step.callables import function_of
from fnaccel.step.precision_policy import Precision
from fnaccel.strategies._torch import (
    drop_unsharded_gradients,
    finish_shards,
    guard_shards,
    reset_shards,
)
from fnaccel.strategies.axis import Build, finisher
from fnaccel.strategies.ddp import Ddp
from fnaccel.strategies.fsdp import Fsdp
from fnaccel.strategies.gather_order import GatherOrder
from fnaccel.strategies.layout import leaves_of, parameters_shown
from fnaccel.strategies.partial_gradients import with_sums
from fnaccel.strategies.same_model import check_alike
from fnaccel.strategies.shard_dims import shard_dims
from fnaccel.strategies.whole_leaves import WholeLeaves
from fnaccel.texts import error_line
from fnaccel.world.mesh import Mesh, ensure_group
from fnaccel.world.undo import StreamStates

_CAST_SAFE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_AT_ONCE = 64
"""Gradients that are averaged by one all-reduce of each dtype."""


@finisher(Fsdp, takes=(Ddp,))
def build_fsdp(build: Build, options: Fsdp) -> tuple[Engine, Built]:
    """The engine of shards. With `ddp` beside it, FSDP2 on a mesh of two axes."""
    mesh = build.spec.mesh
    ensure_group(mesh.world)
    fill = function_of(options.init, "fa.fsdp(init=)") if ":" in options.init else None
    built, values = _construct(build, options)
    if build.settings.captured:
        _check_parameters(built, set(), build)
        return _lazy.load("fnaccel.strategies.fsdp_captured").build_captured(built, build, options), built
    dims = shard_dims(built, mesh.degrees, options)
    shard(built, build, options, dims)
    if options.init != "seeded":
        _fill(built, mesh, options, values)
    if fill is not None:
        _fill_by(fill, built, mesh, build.seed)
    # after `_fill`, which makes other parameters. FSDP2 does not move those that stay whole
    whole = [param for name, param in built.held() if dims[name] is None]
    for param in whole:
        param.data = param.data.to(mesh.world.device)
    host: Any = built.host
    finish_shards(host)
    _guard(built)
    order = GatherOrder(built, mesh)
    averaged = [param for param in whole if param.requires_grad]
    leaves = leaves_of(built, mesh)
    whole_leaves = WholeLeaves(built, leaves, mesh, build.settings.precision.reduce, order)
    hooks = Hooks(
        settle=_settler(host, whole_leaves),
        recover=lambda: reset_shards(host),
        finish=averager(averaged, mesh) if averaged else None,
        abandon=order.abandon,
        explain=_explained,
        told=order.told,
    )
    engine = Engine(
        name="fsdp",
        layout=Layout(
            mesh=mesh,
            model=built.model,
            leaves=leaves,
            parameters=parameters_shown(built, mesh),
            buffers=dict(built.named("buffers")),
        ),
        forward=attrs.evolve(forward_of(host, order), whole=whole_leaves),
        hooks=with_sums(hooks, built, mesh),
    )
    return engine, attrs.evolve(built, empty=options.init == "meta")


def shard(built: Built, build: Build, options: Fsdp, dims: Mapping[str, int | None]) -> None:
    """Let FSDP2 shard the modules.

    Args:
        built: the modules, which are changed.
        build: what the engine is built from.
        options: the axis.
        dims: the result of `shard_dims`. Estimates ask for it before they take equal blocks away.

    Raises:
        CapabilityError: FSDP2 can't shard a parameter, or a parameter is in two units.
    """
    whole = {param for name, param in built.held() if dims[name] is None}
    _check_parameters(built, whole, build)
    try:
        _shard(built, build, options, whole, dims)
    except ValueError as error:
        if isinstance(error, FnaccelError):
            raise
        raise CapabilityError(
            f"fsdp can't shard this model: {error_line(error)}",
            where=f"strategy {build.spec.strategy}",
            fix="tied weights have to lie in one unit: choose larger units (fa.fsdp(units=...)), or use ddp",
        ) from error


def forward_of(host: Any, order: GatherOrder | None = None) -> Forward:
    """How a function of sharded modules is called. Ranks may compare the order of its units."""
    run = _through_host(host, order)
    return Forward(run=run, lend=run, sync=_syncer(host, order))


def _construct(build: Build, options: Fsdp) -> tuple[Built, dict[str, Any]]:
    """The modules, and on rank 0 the values to send if only rank 0 builds them."""
    world = build.spec.mesh.world
    if options.init != "seeded" and not has_factories(build.spec.model):
        raise ArgumentError(
            f'init="{options.init}" builds modules without values, and a built module was given',
            where="fa.fsdp",
            fix="give a factory: fa.distribute(lambda: GPT(config), fa.fsdp(...))",
        )
    values: dict[str, Any] = {}
    if options.init == "rank0" and world.is_main:
        full = construct(build.spec.model, build.seed)
        build.prepare(full)
        values = full.host.state_dict()
    built = construct(build.spec.model, build.seed, empty=options.init != "seeded")
    build.prepare(built)
    check_alike(built, world)
    group = build.spec.mesh.group("loss")
    if built.prebuilt and group is not None:  # as under ddp
        share_first_values(built, group, world.device)
    return built, values


def _check_parameters(built: Built, ignored: set[Any], build: Build) -> None:
    """Raise CapabilityError for a parameter that can't be sharded, or whose hooks would be lost."""
    check_hooks_run(built.modules, captured=False, shards=True)
    for name, param in built.named("parameters"):
        # the captured engine copies its parts, and FSDP2 refuses strides
        strides = not build.settings.captured and not param.is_contiguous()
        if param not in ignored and (param.is_complex() or strides):
            kind = "complex" if param.is_complex() else "not contiguous"
            raise CapabilityError(
                f"{name} is {kind}, and fsdp shards real, contiguous parameters",
                where=f"strategy {build.spec.strategy}",
                fix=f"keep it whole on each rank: fa.fsdp(ignore=({name!r},)); or use ddp"
                + ("" if param.is_complex() else "; or nn.Parameter(value.contiguous())"),
            )


def _shard(
    built: Built, build: Build, options: Fsdp, ignored: set[Any], dims: Mapping[str, int | None]
) -> None:
    from torch.distributed.fsdp import (  # noqa: PLC0415 - slow to import
        CPUOffloadPolicy,
        FSDPModule,
        fully_shard,
        register_fsdp_forward_method,
    )
    from torch.distributed.tensor import Shard  # noqa: PLC0415 - slow to import

    mesh = build.spec.mesh
    shards = mesh.shard_dim
    shared: Any = {
        # one replica has nobody to average with: on both axes FSDP2 would talk to itself
        "mesh": mesh.shown[shards if mesh.gradient_size == mesh["shard"].size else ("dp_replicate", shards)],
        "reshard_after_forward": options.reshard_after_forward,
        "ignored_params": ignored or None,
    }
    if any(dims.values()):
        placements = {id(p): Shard(dims[name] or 0) for name, p in built.held()}
        shared["shard_placement_fn"] = lambda p: placements[id(p)]
    if options.offload:
        shared["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.world.device.type != "cpu")
    in_order: list[Any] = []
    for key, module in built.modules.items():
        units = find_units(module, built.units.get(key, options.units), "fa.fsdp(units=...)")
        _check_tied(module, units, ignored)
        _check_dtypes([*reversed(units), (key or "the root", module)], ignored)
        for _, unit in reversed(units):
            if any(p not in ignored for p in unit.parameters()):
                fully_shard(
                    unit, **shared, mp_policy=options.policy or mixed_precision_of(build.settings.precision)
                )
        in_order += [unit for _, unit in units if isinstance(unit, FSDPModule)]
        for _, unit in units:
            for method in options.methods:
                if hasattr(unit, method):
                    register_fsdp_forward_method(unit, method)
    root = options.policy or mixed_precision_of(build.settings.precision, root=built.host, ignored=ignored)
    # backward begins with the root: freed after forward, it would be gathered again at once
    fully_shard(built.host, **shared | {"reshard_after_forward": False}, mp_policy=root)
    _prefetch(built.host, in_order, options)


def _prefetch(root: Any, units: Sequence[Any], options: Fsdp) -> None:
    """Let each unit gather the next ones ahead of their turn."""
    ahead, behind = options.forward_prefetch, options.backward_prefetch
    if ahead:
        for index, unit in enumerate([root, *units]):
            unit.set_modules_to_forward_prefetch(list(units[index : index + ahead]))
    if behind > 1:
        for index, unit in enumerate([*units, root]):
            unit.set_modules_to_backward_prefetch(list(units[max(0, index - behind) : index])[::-1])


def _check_tied(root: nn.Module, units: Sequence[tuple[str, nn.Module]], ignored: set[Any]) -> None:
    """Check that no parameter is in two units, or in one and outside: torch would part the two.

    Raises:
        CapabilityError: a parameter is. The message names both places.
    """
    seen: dict[Any, tuple[str, str]] = {}
    for unit, module in units:
        for name, param in module.named_parameters():
            first, where = seen.setdefault(param, (unit, f"{unit}.{name}"))
            apart = not (f"{first}.".startswith(f"{unit}.") or f"{unit}.".startswith(f"{first}."))
            if param not in ignored and apart:
                raise CapabilityError(
                    f"{where} and {unit}.{name} are one parameter, in two units",
                    where="fa.fsdp(units=...)",
                    fix="choose larger units, that hold both, or use ddp",
                )
    inside = {inner for _, unit in units for inner in unit.modules()}
    for path, owner in root.named_modules():
        for name, param in owner.named_parameters(recurse=False):
            if param in seen and param not in ignored and owner not in inside:
                raise CapabilityError(
                    f"{seen[param][1]} and {path}.{name} are one parameter, in a unit and outside of it",
                    where="fa.fsdp(units=...)",
                    fix="choose units that leave both out, or use ddp",
                )


def _check_dtypes(units: Sequence[tuple[str, nn.Module]], ignored: set[Any]) -> None:
    """Check that the trained parameters of each unit have one dtype. Inner units come first.

    Raises:
        CapabilityError: two dtypes in one unit. The message names a parameter of each.
    """
    taken = set(ignored)
    for unit, module in units:
        firsts: dict[torch.dtype, str] = {}
        for name, param in module.named_parameters():
            if param not in taken and param.requires_grad:
                firsts.setdefault(param.dtype, f"{name} is {str(param.dtype).removeprefix('torch.')}")
            taken.add(param)
        if len(firsts) > 1:
            raise CapabilityError(
                f"a unit of fsdp trains one dtype, and in {unit} {' and '.join(firsts.values())}",
                where="strategy fsdp",
                fix='fa.with_precision(step, "fp32") gives all parameters one dtype; '
                "or keep one whole: fa.fsdp(ignore=...); or use ddp",
            )


def mixed_precision_of(precision: Precision, root: nn.Module | None = None, ignored: object = ()) -> Any:
    """The policy of `with_precision`: gather in the compute dtype, reduce in the reduce dtype."""
    from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415 - slow to import

    cast = precision.compute if precision.autocast else None
    if cast is not None and root is not None:
        # the root's inputs are the batch, which autocast casts when it must: only modules that
        # autocast covers may have their parameters gathered in the compute dtype
        owned = [m for m in root.modules() if _owns(m, ignored)]
        cast = cast if all(isinstance(m, _CAST_SAFE) for m in owned) else None
    reduce = precision.reduce if precision.reduce is not precision.param or cast is not None else None
    return MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=reduce, cast_forward_inputs=root is None)


def _owns(module: nn.Module, ignored: Any) -> bool:
    """Whether a module has parameters of its own that no unit has taken."""
    direct = list(module.parameters(recurse=False))
    return any(not hasattr(p, "placements") and p not in ignored for p in direct)


def _fill(built: Built, mesh: Mesh, options: Fsdp, values: dict[str, Any]) -> None:
    """Allocate the shards of a model built without values, and fill them from rank 0 or with NaN."""
    buffers = {name: value.clone() for name, value in built.named("buffers")}
    where = torch.device("cpu") if options.offload else mesh.world.device
    built.host.to_empty(device=where)
    with torch.no_grad():
        for name, value in built.named("buffers"):
            value.copy_(buffers[name])
        if options.init != "rank0":
            for _, param in built.named("parameters"):
                _torch.local_of(param).fill_(float("nan"))  # loud, if nothing is restored
            return
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415 - slow to import
        StateDictOptions,
        set_model_state_dict,
    )

    how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=options.offload)
    set_model_state_dict(built.host, values, options=how)


def _fill_by(fill: Callable[[nn.Module], object], built: Built, mesh: Mesh, seed: int) -> None:
    """Let a function fill the parameters of one module after the other, and keep this rank's part of them.

    Raises:
        ArgumentError: it leaves a parameter without values.
    """
    shown = parameters_shown(built, mesh)
    names = {param: name for name, param in built.named("parameters")}
    streams = StreamStates.of(mesh.world.device)
    streams.reseed(seed)
    try:
        for module in (inner for outer in built.modules.values() for inner in outer.modules()):
            slots: dict[str, Any] = _torch.parameters_of(module)
            own = {attribute: param for attribute, param in slots.items() if param is not None}
            try:
                for attribute, param in own.items():
                    like = shown[names[param]]
                    empty = torch.full(like.shape, float("nan"), dtype=like.dtype, device=mesh.world.device)
                    slots[attribute] = nn.Parameter(empty, requires_grad=param.requires_grad)
                if own:
                    fill(module)
                for attribute, param in own.items():
                    _keep_part(param, shown[names[param]], slots[attribute].detach(), names[param])
            finally:
                slots.update(own)
    finally:
        streams.put_back()


def _keep_part(param: Any, like: Any, whole: torch.Tensor, name: str) -> None:
    if whole.isnan().any():
        raise ArgumentError(
            f"the function left {name} without values, or with NaN",
            where="fa.fsdp(init=)",
            fix="fill the parameters of each module: module.reset_parameters(), or torch.nn.init",
        )
    with torch.no_grad():
        _torch.local_of(param).copy_(_torch.local_of(tree.laid_out(whole, like=like)))


def _through_host(host: nn.Module, order: GatherOrder | None) -> Callable[..., Any]:
    def run(fn: Callable[..., Any], *args: Any) -> Any:
        try:
            # `Module.__call__`: FSDP2's hook on the host gathers the root's parameters here, and its hooks on
            # units gather theirs as the loss calls them
            result = host(fn, *args)
        except RuntimeError as error:
            explained = _explained(error)
            if explained is None:
                raise
            raise explained from error
        if order is not None and order.open:
            order.end_forward()
        return result

    return run


_WHOLE_FIX = "fa.params(model) and fa.call(model, params, ...) compute with whole parameters; or use fa.ddp()"
# parts of torch's messages, what they mean for a user, and a way out
_EXPLAINED = (
    (
        "mixed torch.Tensor and DTensor",
        "the loss used the parameters of a sharded unit outside its forward, or after a gradient that it "
        "took by itself (torch.autograd.grad)",
        'name the method it calls: fa.fsdp(methods=("encode",)); or choose larger units. For a gradient '
        f"inside of the loss, {_WHOLE_FIX}",
    ),
    (
        "not have been used in the graph",
        "the loss differentiated with respect to parameters, which are shards between two forwards of their "
        "unit: the graph holds the gathered ones",
        f"{_WHOLE_FIX}; allow_unused=True would give None for them",
    ),
    (
        "setStorage",
        "the loss takes a second derivative through a sharded unit, whose gathered parameters are freed "
        "after the first one",
        _WHOLE_FIX,
    ),
    (
        r"(BFloat16|Half) but found Float|same dtype, but got Float",
        "a layer computes with weights that fsdp gathered in bf16 or fp16 and with fp32, such as its buffers",
        'keep the parameters of this layer whole, in fp32: fa.fsdp(ignore=("*.norm.*",))',
    ),
)


def _explained(error: BaseException) -> CapabilityError | None:
    """The error for what FSDP2 can't do, in the place of one of torch's."""
    if isinstance(error, RuntimeError) and not isinstance(error, FnaccelError):
        for part, what, fix in _EXPLAINED:
            if re.search(part, str(error)):
                return CapabilityError(what, where="the loss function under fsdp()", fix=fix)
    return None


def _guard(built: Built) -> None:
    """Let units refuse parameters that are not theirs: FSDP2 would ignore those, without a word."""
    for key, model in built.modules.items():
        for name, module in model.named_modules():
            if hasattr(module, "_get_fsdp_state"):
                guard_shards(module, functools.partial(_refuse, name if key is None else f"{key}/{name}"))


def _refuse(unit: str, name: str) -> None:
    raise CapabilityError(
        f"the parameter {name!r} inside of {unit!r} was replaced for a call (torch.func.functional_call), "
        "and fsdp would put its own in that place: the given one would be ignored",
        where="a function of the model under fsdp()",
        fix=f"{_WHOLE_FIX}; or fa.compile(step), if the plan says that it compiles the whole step",
    )


def _settler(host: nn.Module, leaves: WholeLeaves) -> Callable[[], None]:
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - slow to import

    units = [module for module in host.modules() if isinstance(module, FSDPModule)]

    def settle() -> None:
        # ZeRO-2 and the root keep gathered parameters after a forward: without a backward they
        # would go stale at the next update
        for unit in units:
            drop_unsharded_gradients(unit)  # left by a micro-batch before one that failed
            unit.reshard()
        leaves.drop()

    return settle


def _syncer(host: Any, order: GatherOrder | None) -> Callable[[bool], contextlib.AbstractContextManager[Any]]:
    communicating = True

    @contextlib.contextmanager
    def sync(communicate: bool) -> Generator[None]:
        nonlocal communicating
        if communicate is not communicating:
            host.set_requires_gradient_sync(communicate)
            host.set_is_last_backward(communicate)
            communicating = communicate
        yield
        if communicate and order is not None and order.open:
            order.close()

    return sync


def averager(params: Sequence[Any], mesh: Mesh) -> Callable[[], None]:
    """A function that averages gradients over the ranks of a mesh that have other rows."""
    group = mesh.group("gradient")

    def average() -> None:
        if group is None:
            return
        for first in range(0, len(params), _AT_ONCE):
            some = params[first : first + _AT_ONCE]
            # every parameter has its place, also if this rank did not use it: other ranks may have
            grads = [torch.zeros_like(p) if p.grad is None else p.grad.resolve_conj() for p in some]
            # complex gradients as pairs
            reals = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
            for dtype in dict.fromkeys(real.dtype for real in reals):
                own = [real for real in reals if real.dtype is dtype]
                flat = torch.cat([real.flatten() for real in own])
                dist.all_reduce(flat, group=group)
                flat /= mesh.gradient_size
                for real, part in zip(own, flat.split([real.numel() for real in own]), strict=True):
                    real.copy_(part.view_as(real))
            for param, grad in zip(some, grads, strict=True):
                param.grad = grad

    return average
