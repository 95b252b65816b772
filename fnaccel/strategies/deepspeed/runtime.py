"""The engine of `deepspeed`: DeepSpeed's own, behind the table of functions that all engines are."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Sequence
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from fnaccel.engine.runtime_tensor import Remote
from fnaccel.errors import ArgumentError, CapabilityError, ConfigError, FnaccelError, nearest
from fnaccel.extend import (
    Build,
    Built,
    Engine,
    Forward,
    Group,
    Hooks,
    Layout,
    Leaf,
    Member,
    Mesh,
    Optimizer,
    Runtime,
    construct,
    finisher,
    group_leaves,
)
from fnaccel.models._torch import Norm
from fnaccel.models.building import has_factories
from fnaccel.optim.deepspeed import DeepspeedKernel
from fnaccel.optim.foreign import TorchKernel, copied_slots, first_slots, shared_options
from fnaccel.optim.fused import FusedKernel
from fnaccel.strategies.deepspeed.comm import begin, part_of_package, quiet
from fnaccel.strategies.deepspeed.declared_rows import DeclaredRows
from fnaccel.strategies.deepspeed.linear import LinearFunction
from fnaccel.strategies.deepspeed.partitioned_init import check_partitioned, partitioned_init
from fnaccel.strategies.deepspeed.parts import Native, Parts
from fnaccel.strategies.deepspeed.record import Deepspeed
from fnaccel.strategies.deepspeed.update import BoundDeepspeed
from fnaccel.strategies.layout import leaves_of
from fnaccel.strategies.same_model import check_alike

_FIRST_MICRO_STEP = -1  # deepspeed.runtime.zero.stage_1_and_2.INITIAL_MICRO_STEP_ID
_FUSED = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@finisher(Deepspeed)
def build_deepspeed(build: Build, record: Deepspeed) -> tuple[Engine, Built]:
    """The engine of DeepSpeed's ZeRO.

    Raises:
        MissingBackendError: DeepSpeed is not installed.
        ConfigError: it refuses the configuration.
        CapabilityError: it can't take the optimizer.
    """
    if build.delegation is None:
        raise CapabilityError("no configuration was made", where="fa.deepspeed", fix="use fa.train_step")
    config = copy.deepcopy(build.delegation.config)
    mesh = build.spec.mesh
    package = begin(mesh.world)
    linear = LinearFunction()
    with linear.built():
        built = _construct(build, record, package, config)
    _mark_leaves(built, record)
    half = any(config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
    _check_parameters(built)
    if half:
        _check_norms(built, mesh.world.device.type)
    # DeepSpeed makes its fp32 parameters of the half-precision copy: these are the original values
    values = (
        {n: p.detach().clone() for n, p in built.named("parameters")}
        if half and not record.zero3_init
        else {}
    )
    optimizers = cast("dict[str | None, Optimizer] | None", build.spec.optimizers)
    optimizer = None if optimizers is None else next(iter(optimizers.values()))
    groups = [] if optimizer is None else group_leaves(optimizer, leaves_of(built, mesh))
    if optimizer is not None:
        _check_foreign(optimizer, len(groups), record.level)
    with linear.built():
        engine = _initialise(package, built, optimizer, groups, config)
    parts = Parts(engine, record.level)
    named = dict(built.named("parameters"))
    for name, value in values.items():
        parts.write(named[name], value)
    bound = None
    if optimizer is not None:
        names = parts.make_slots()
        trained = [name for name, param in named.items() if param.requires_grad]
        slots = {
            name: {slot: _remote(mesh, parts, named[name], f"opt/{name}/{slot}", slot) for slot in names}
            for name in trained
        }
        clip = float(config["gradient_clipping"])
        bound = BoundDeepspeed(engine, parts, slots, clip, skips=build.settings.skips)
    torn: list[bool] = []
    rows = build.delegation.rows
    wrapped = Engine(
        name="deepspeed",
        layout=Layout(
            mesh=mesh,
            model=built.model,
            leaves=tuple(Leaf(n, p, p.data, p) for n, p in named.items() if p.requires_grad),
            parameters={n: _remote(mesh, parts, p, f"params/{n}") for n, p in named.items()},
            buffers=dict(built.named("buffers")),
        ),
        forward=Forward(
            run=_runner(engine, torn, linear),
            lend=_runner(engine.module, torn, linear),
            sync=_syncer(engine),
            nests=False,
            backward=_backward(engine, record.level, torn, linear),
        ),
        hooks=Hooks(
            recover=_recoverer(engine, record.level),
            free=_freer(engine, parts),
            ask=None if rows is None else lambda micro_batches: DeclaredRows(rows, micro_batches, mesh.world),
        ),
        runtime=Runtime(bound=bound, native=engine),
    )
    return wrapped, built


def _construct(build: Build, record: Deepspeed, package: ModuleType, config: dict[str, Any]) -> Built:
    """The modules. Under `zero3_init` each parameter is partitioned when it is made."""
    if record.zero3_init and not has_factories(build.spec.model):
        raise ArgumentError(
            "zero3_init partitions parameters as they are made, and a built module was given",
            where="fa.deepspeed",
            fix="give a factory: fa.distribute(lambda: GPT(config), fa.deepspeed(stage=3, zero3_init=True))",
        )
    if record.zero3_init:
        with partitioned_init(package, config):
            built = construct(build.spec.model, build.seed)
        check_partitioned(built.modules)
    else:
        built = construct(build.spec.model, build.seed)
    build.prepare(built)
    check_alike(built, build.spec.mesh.world)
    return built


def _check_parameters(built: Built) -> None:
    """Raise CapabilityError if DeepSpeed would fail in the middle, or compute in another dtype."""
    for name, param in built.named("parameters"):
        shape: Any = getattr(param, "ds_shape", param.shape)
        if not shape or not shape.numel():
            raise CapabilityError(
                f"{name} has shape {list(shape)}, and DeepSpeed needs a dimension and elements to partition",
                where="fa.deepspeed",
                fix="give it shape [1], leave it out, or use fa.ddp() or fa.fsdp(); under zero3_init build "
                "each layer by itself, since a copy of a layer has empty parameters",
            )
        if not hasattr(param, "ds_shape") and param.dtype is not torch.float32:
            raise CapabilityError(
                f"{name} is {param.dtype}, and DeepSpeed updates parameters in fp32",
                where="fa.deepspeed",
                fix="build the model in fp32: model.float(); fa.with_precision sets its compute dtype",
            )


def _check_norms(built: Built, device: str) -> None:
    """Raise CapabilityError if a norm would have half-precision weights and fp32 averages on a CPU."""
    for name, module in built.host.named_modules():
        tracks = isinstance(module, Norm) and module.track_running_stats
        if device == "cpu" and tracks and any(True for _ in module.parameters()):
            raise CapabilityError(
                f"{name.removeprefix('target.')} is a {type(module).__name__}: DeepSpeed casts its weights, "
                "and on a CPU torch needs them in the dtype of its running averages",
                where="fa.deepspeed, fa.with_precision",
                fix="train in fp32, use another norm, or fa.fsdp()",
            )


def _mark_leaves(built: Built, record: Deepspeed) -> None:
    """Tell DeepSpeed which modules to gather as one."""
    if not record.moe_layers:
        return
    classes = {type(module).__name__: type(module) for module in built.host.modules()}
    for name in record.moe_layers:
        if name not in classes:
            raise ArgumentError(
                f"no module of the model is a {name}",
                where="fa.deepspeed(moe_layers=)",
                fix=nearest(name, classes),
            )
    part_of_package("utils").set_z3_leaf_modules(built.host, [classes[name] for name in record.moe_layers])


def _check_foreign(optimizer: Optimizer, groups: int, level: int) -> None:
    """Raise CapabilityError if DeepSpeed would run an optimizer of torch.optim otherwise than torch.

    Slots that begin at the learning rate would begin at 0. DeepSpeed makes a new Adagrad with one group. Flat
    partitions lose a parameter's shape.
    """
    kernel: Any = optimizer.kernel
    if not isinstance(kernel, TorchKernel):
        return
    matrix = nn.Parameter(torch.zeros(2, 3))
    member = Member(0, Leaf("", matrix, matrix.data, matrix))

    def group_at(rate: float) -> Group:
        return Group((member,), dict(optimizer.options), None, rate)

    def slots_at(rate: float) -> dict[str, Any]:
        return first_slots(kernel.cls, [group_at(rate)])[0]

    slots, halved = slots_at(1.0), slots_at(0.5)
    of_rate = [
        name for name, value in slots.items() if not torch.equal(*map(torch.as_tensor, (value, halved[name])))
    ]
    if of_rate:
        raise CapabilityError(
            f"{optimizer.name} begins {', '.join(of_rate)} at the learning rate, which DeepSpeed sets later",
            where="fa.train_step(optimizer=)",
            fix="fa.sgd, fa.adam, fa.adamw, RMSprop, Adagrad; or fa.ddp()",
        )
    copies = copied_slots(kernel.cls, group_at(1.0))[0]
    if copies:
        raise CapabilityError(
            f"{optimizer.name} begins {', '.join(copies)} at the parameter's value, and DeepSpeed at 0",
            where="fa.train_step(optimizer=)",
            fix="fa.sgd, fa.adam, fa.adamw, RMSprop, Adagrad; or fa.ddp() or fa.fsdp()",
        )
    if not level:
        return
    if groups > 1 and kernel.cls is torch.optim.Adagrad:
        raise CapabilityError(
            "DeepSpeed makes a new Adagrad, with one group for all parameters",
            where="fa.train_step(optimizer=)",
            fix="leave out groups=; or fa.sgd, fa.adam, fa.adamw, RMSprop, fa.ddp()",
        )
    odd = [
        name
        for name, value in slots.items()
        if name != "step" and getattr(value, "shape", None) != matrix.shape
    ]
    if odd:
        raise CapabilityError(
            f"{optimizer.name} keeps {', '.join(odd)}, not one number for each element, "
            "and DeepSpeed partitions elements",
            where="fa.train_step(optimizer=)",
            fix="fa.sgd, fa.adam, fa.adamw, RMSprop, Adagrad; or fa.ddp()",
        )


def _initialise(
    package: ModuleType,
    built: Built,
    optimizer: Optimizer | None,
    groups: Sequence[Group],
    config: dict[str, Any],
) -> Any:
    params = [
        {
            "params": [m.leaf.param for m in group.members],
            "lr": group.first_rate,
            **_options(optimizer, group),
        }
        for group in groups
    ]
    client = None
    if optimizer is not None and not isinstance(optimizer.kernel, DeepspeedKernel):
        client = _client(optimizer, params, groups)
    try:
        with quiet():
            engine, *_ = package.initialize(
                model=built.host, optimizer=client, model_parameters=params or None, config=config
            )
    except FnaccelError:
        raise
    except Exception as error:  # of many classes: DeepSpeed's own, pydantic's, asserts
        text = str(error).strip() or repr(error)
        lines = [line.strip() for line in text.splitlines() if "errors.pydantic.dev" not in line]
        raise ConfigError(
            f"DeepSpeed refuses this configuration ({type(error).__name__}): {'; '.join(lines[:6])}",
            where="fa.deepspeed",
            fix="see train_step.plan.deepspeed, and https://www.deepspeed.ai/docs/config-json/",
        ) from error
    return engine


def _options(optimizer: Optimizer | None, group: Group) -> dict[str, Any]:
    """The options that differ in this group. The configuration's own optimizer has the others."""
    if optimizer is None or isinstance(optimizer.kernel, DeepspeedKernel):
        shared = {} if optimizer is None else dict(optimizer.options)
        return {name: value for name, value in group.options.items() if shared.get(name, group) != value}
    return group.options


def _client(optimizer: Optimizer, params: list[dict[str, Any]], groups: Sequence[Group]) -> Any:
    """The torch optimizer of a description: fused, which on a CPU needs no build."""
    kernel: Any = optimizer.kernel
    if isinstance(kernel, FusedKernel):
        return _FUSED[kernel.name](params, fused=True)
    if isinstance(kernel, TorchKernel):
        return kernel.cls(params, **shared_options(kernel.cls, groups))
    raise CapabilityError(
        f"DeepSpeed takes an optimizer of torch, and fa.{optimizer.name} is none",
        where="fa.train_step(optimizer=)",
        fix="fa.sgd, fa.adam, fa.adamw, fa.optim.from_torch(...), or fa.optim.from_deepspeed(...)",
    )


def _remote(mesh: Mesh, parts: Parts, param: torch.Tensor, name: str, slot: str | None = None) -> Remote:
    return Remote.make(
        parts.shape(param),
        name=name,
        read=lambda: parts.read(param, slot),
        write=lambda value: parts.write(param, value, slot),
        mesh=mesh,
    )


def _runner(module: nn.Module, torn: list[bool], linear: LinearFunction) -> Callable[..., Any]:
    """Run a function of the model inside DeepSpeed's forward, whose hooks know tensors only."""

    def run(fn: Callable[..., Any], *args: Any) -> Any:
        if torn:
            raise CapabilityError(
                "a backward pass failed, and from stage 2 on DeepSpeed can't take back reduced gradients",
                where="train_step(state, batch) under fa.deepspeed",
                fix="fa.save(directory, state), which is as it was, and restore it into train_step.init()",
            )
        outputs: list[Any] = []

        def entry(model: object, *arguments: Any) -> Any:
            result = fn(model, *arguments)
            if isinstance(result, torch.Tensor):
                return result
            outputs.append(result)
            return ()

        with linear.active():
            result = module(entry, *args)
        return outputs[0] if outputs else result

    return run


def _backward(
    engine: Native, stage: int, torn: list[bool], linear: LinearFunction
) -> Callable[[torch.Tensor], None]:
    """Differentiate a total. `torn` is filled if that fails in the middle of a reduction."""

    def backward(total: torch.Tensor) -> None:
        try:
            # times one: DeepSpeed divides the forward's own output by the number of micro-batches
            with linear.active():  # blocks may run again
                engine.backward(total * 1.0, scale_wrt_gas=False)
        except BaseException:
            if stage >= 2:
                torn.append(True)
            raise

    return backward


def _syncer(engine: Native) -> Callable[[bool], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def sync(communicate: bool) -> Generator[None]:
        engine.set_gradient_accumulation_boundary(communicate)
        yield

    return sync


def _recoverer(engine: Native, stage: int) -> Callable[[], None]:
    """A function that undoes a step that failed between its first forward and its update."""

    def recover() -> None:
        optimizer: Any = engine.optimizer
        engine.zero_grad()
        if stage == 0 or optimizer is None:
            return
        optimizer.zero_grad()
        if stage < 3:  # gradients of earlier micro-batches in its partition
            optimizer.micro_step_id = _FIRST_MICRO_STEP
            for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
                for key in gradients:
                    gradients[key] = None

    return recover


def _freer(engine: Native, parts: Parts) -> Callable[[], None]:
    def free() -> None:
        parts.closed = True
        modules, params = list(engine.module.modules()), list(engine.module.parameters())
        optimizer = engine.optimizer
        engine.destroy()
        # stage 3 ties parameters, modules, hooks and the engine into one knot. torch holds parts of it (a
        # class of autograd functions for each module), so that Python would never collect it
        if parts.stage == 3:
            for param in params:
                param.data = param.data.new_empty(0)
        for owner in (*params, getattr(optimizer, "parameter_offload", None), optimizer, engine):
            if hasattr(owner, "__dict__"):
                vars(owner).clear()
        for module in modules:
            vars(module)["_parameters"] = dict(vars(module)["_parameters"])

    return free
