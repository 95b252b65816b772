"""`training`: the memory of one rank over a train step, for any strategy and any number of ranks."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fnaccel.errors import ArgumentError, CapabilityError, FnaccelError, require
from fnaccel.estimate.account import GRADIENTS, Account, Peak
from fnaccel.estimate.repeated import CHECKED, TRACED
from fnaccel.estimate.stages import OneStage, Schedules, peaks_of_rank
from fnaccel.estimate.trace import TracePlan, trace
from fnaccel.estimate.work import Work
from fnaccel.extend import Built, Mesh, Spec, Strategy, construct
from fnaccel.models import _torch
from fnaccel.models.blocks import HasUnits, find_units
from fnaccel.models.building import freeze, has_factories, release
from fnaccel.optim.several import OptimizerLike
from fnaccel.program.axes_applied import apply_axes
from fnaccel.program.launcher_flags import Chosen, choose
from fnaccel.program.lower import Lowered
from fnaccel.program.planned import Planned, planned
from fnaccel.step.step import StepLike
from fnaccel.strategies.axis import Rewrites
from fnaccel.strategies.distribute import Distributed
from fnaccel.strategies.footprint import Footprint, footprint_of
from fnaccel.strategies.fsdp import Fsdp
from fnaccel.texts import size_of
from fnaccel.tree import Tree
from fnaccel.world.mesh import build, resolve
from fnaccel.world.simulation import absent_world, check_machines, check_ranks, simulate

_KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "averages": "averages of parameters",
    "model": "buffers of the model",
    "batch": "batch",
    "gathered": "gathered parameters",
    "buffers": "buffers of collectives",
    "activations": "activations",
}


_WHERE = "fa.estimate.training"


@attrs.frozen(kw_only=True)
class TrainingEstimate:
    """The memory of the largest rank over a step. Print it.

    Attributes:
        footprint: parameters, slots and collectives of the rank.
        peak: the moment with the most live bytes.
        phases: live bytes at most in each phase of the step.
        left_out: how many blocks were counted, and not traced.
        work: floating-point operations, those of the busiest rank of a pipeline, and the collectives of a
            step by axis and kind.
        degrees: ranks along each axis.
        offloads: whether parameters, gradients and slots are in the memory of the host.
        idle: the share of time in which ranks of a pipeline wait for each other.

    Example:
        >>> estimate = fa.estimate.training(
        ...     loss_fn, model=fa.distribute(GPT, "ddp"), optimizer=fa.adamw(3e-4), batch=batch, ranks=2
        ... )
        >>> print(estimate)
        ddp(): 2 ranks, dp_replicate=2
          peak ...
    """

    footprint: Footprint
    peak: Peak
    phases: Mapping[str, int]
    left_out: int
    work: Work
    degrees: Mapping[str, int]
    offloads: bool = False
    idle: float = 0.0

    @property
    def total(self) -> int:
        """Bytes of the rank at the peak, on its device and on the host."""
        return self.peak.total

    @property
    def on_device(self) -> int:
        """Bytes of the rank at the peak, without those that are offloaded to the host."""
        offloaded = ("parameters", GRADIENTS, "optimizer") if self.offloads else ()
        return self.total - sum(self.peak.kinds.get(kind, 0) for kind in offloaded)

    def __str__(self) -> str:
        host = f" ({size_of(self.on_device)} of it on the device)" if self.offloads else ""
        lines = [self.footprint.layout, f"  peak {size_of(self.total)}{host}, in {self.peak.phase}:"]
        lines += [
            f"    {title:<23}{size_of(self.peak.kinds[kind])}"
            for kind, title in _KINDS.items()
            if self.peak.kinds.get(kind)
        ]
        phases = ", ".join(f"{phase} {size_of(size)}" for phase, size in self.phases.items())
        lines.append(f"  by phase: {phases}")
        if self.work.counts:
            lines.append("  collectives of a step:")
        lines += [
            f"    {axis:<13}{self.work.counts[axis, kind]} {kind}, {size_of(size)}"
            for (axis, kind), size in self.work.sizes.items()
        ]
        if self.idle:
            lines.append(f"  ranks wait {self.idle:.0%} of the time for other stages")
        return "\n".join(lines)


def training(
    step: StepLike,
    *,
    model: Distributed,
    optimizer: OptimizerLike | None,
    batch: Tree,
    ranks: int = 1,
    per_machine: int | None = None,
    frozen: str | Callable[..., bool] | Iterable[str | Callable[..., bool]] = (),
) -> TrainingEstimate:
    """The memory of one rank over a train step. Nothing is allocated, and no rank is started.

    The forward and backward passes run without values, for four of each run of equal blocks. Under fsdp
    they run in FSDP2, on ranks that are simulated. The bytes that live for all of a step are arithmetic. So
    the number of ranks and blocks costs nothing. If a trace of six blocks does not agree, all are traced.

    Args:
        step: as for `fa.train_step`.
        model: a distributed factory.
        optimizer: a description such as `fa.adamw(3e-4)`.
        batch: the rows of one rank: tensors of which only shapes and dtypes are read.
        ranks: how many ranks there would be.
        per_machine: how many of them on one machine. By default all.
        frozen: patterns, or functions `(name, parameter) -> bool`, of the parameters that are not trained.

    Raises:
        ArgumentError: a built module in the place of a factory.
        AxisProductError: the strategy does not fit the ranks.
        CapabilityError: a runtime such as DeepSpeed lays the model out itself, an operation needs values, or
            ranks of fsdp or tensor would be simulated in a process that has a process group.

    Example:
        >>> estimate = fa.estimate.training(
        ...     loss_fn, model=fa.distribute(GPT, "fsdp"), optimizer=fa.adamw(3e-4), batch=batch, ranks=8
        ... )
        >>> estimate.total == sum(estimate.peak.kinds.values())
        True
    """
    chosen, planned_step = _planned(step, model, optimizer, ranks, per_machine, frozen)
    if not has_factories(chosen.model):
        raise ArgumentError("a built module was given", where=_WHERE, fix="give its factory")
    if planned_step.delegation is not None:
        raise CapabilityError(
            f"{planned_step.delegation.by} lays the model out itself, and its memory is not counted here",
            where=_WHERE,
            fix="estimate fsdp, which holds as much as ZeRO-3: fa.distribute(model, fa.fsdp())",
        )
    if planned_step.spec.mesh.degrees.get("cp", 1) > 1:
        raise CapabilityError(
            "ranks of context share a row, and their activations are not counted yet",
            where=_WHERE,
            fix="estimate a shorter row without the axis: its activations are those of one rank",
        )
    try:
        with _quietly(), _on_simulated_ranks(planned_step.spec, chosen.strategy) as spec:
            axis = next((x for x in chosen.strategy.axes if isinstance(x, Schedules)), None)
            if axis is not None and planned_step.spec.mesh.degrees[axis.mesh_axis] > 1:
                return _of_stages(axis, chosen, planned_step, spec, batch)
            few = _of_few_blocks(chosen, planned_step, spec, batch)
            return _built_and_traced(chosen, planned_step, spec, batch, 0) if few is None else few
    except FnaccelError:
        raise
    except _torch.NEEDS_VALUES as error:
        raise CapabilityError(
            f"an operation of the model needs values, and there are none: {str(error).splitlines()[0]}",
            where=_WHERE,
            fix="estimate a variant of the model without it, such as dense layers in the place of experts; "
            "`fnaccel plan` counts all but activations",
        ) from error
    except Exception as error:
        raise CapabilityError(
            f"the step fails on tensors without values: {type(error).__name__}: {_first_line(error)}",
            where=_WHERE,
            fix="run the loss on such a batch. If it runs, estimate it in another precision or without the "
            "operation that fails",
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no text"])[0]


@contextlib.contextmanager
def _quietly() -> Generator[None]:
    """Have torch log no traceback of operations that fail on tensors without values."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _of_few_blocks(chosen: Chosen, planned_step: Planned, spec: Spec, batch: Tree) -> TrainingEstimate | None:
    """The estimate from a few of the repeated blocks, or None if they do not stand for the others."""
    try:
        few = _built_and_traced(chosen, planned_step, spec, batch, TRACED)
        if not few.left_out:
            return few
        more = _built_and_traced(chosen, planned_step, spec, batch, CHECKED)
        return few if _alike(few, more) else None
    except (FnaccelError, *_torch.NEEDS_VALUES):
        raise
    except Exception:
        return None  # a model may count on the number of its blocks


def _alike(one: TrainingEstimate, other: TrainingEstimate) -> bool:
    """Whether two estimates, from traces of a few blocks and of more, differ by less than 0.5 %."""
    pairs = [(one.total, other.total), (one.work.flops, other.work.flops)]
    pairs += [(one.phases[phase], other.phases.get(phase, 0)) for phase in one.phases]
    return all(abs(first - second) <= 0.005 * second for first, second in pairs)


def _built_and_traced(
    chosen: Chosen,
    planned_step: Planned,
    simulated: Spec,
    batch: Tree,
    most: int,
    stage: OneStage | None = None,
) -> TrainingEstimate:
    built = construct(chosen.model, 0, empty=True)
    try:
        return _of(built, chosen.strategy, planned_step, simulated, batch, most, stage)
    finally:
        release(built)


def _of_stages(
    axis: Schedules, chosen: Chosen, planned_step: Planned, simulated: Spec, batch: Tree
) -> TrainingEstimate:
    """The rank of a pipeline that holds most. Stages that are alike are traced once."""
    spec = planned_step.spec
    size, n = spec.mesh.degrees[axis.mesh_axis], max(1, spec.step.settings.micro_batches)
    timing = axis.timing(size, n)
    built = construct(chosen.model, 0, empty=True)
    try:
        split, named = axis.split_of(built.model, size), dict(built.named("parameters"))
        shared = [
            sum(named[name].nbytes for name, users in split.users.items() if len(users) > 1 and rank in users)
            for rank in range(size)
        ]
        numbers = range(split.stages)
        kinds = [(number == 0, number == split.stages - 1, _blocks_of(split, number)) for number in numbers]
    finally:
        release(built)
    on_rank = [[number for number in numbers if split.homes[number] == rank] for rank in range(size)]
    known: dict[object, tuple[TrainingEstimate, OneStage]] = {}
    traced: list[tuple[TrainingEstimate, OneStage]] = []
    for number in numbers:  # what a rank holds for all of a step depends on all of its stages
        key = kinds[number], tuple(kinds[each] for each in on_rank[split.homes[number]])
        if key not in known:
            stage = OneStage(axis, number)
            known[key] = _built_and_traced(chosen, planned_step, simulated, batch, 0, stage), stage
        traced.append(known[key])
    lowered, sharded = planned_step.lowered(None), any(isinstance(x, Fsdp) for x in chosen.strategy.axes)
    stages = [stage for _, stage in traced]
    ranks: list[TrainingEstimate] = []
    for own, row, tied in zip(on_rank, timing.rows, shared, strict=True):
        estimate, work = traced[own[0]][0], Work()
        for number in own:
            work.add(traced[number][0].work)
            for each in (number, number - 1):  # activations go on, and gradients back
                if 0 <= each < split.stages - 1:
                    work.send(axis.mesh_axis, "send", n * stages[each].sent, n)
        if tied:  # the gradient of a tied weight goes to its owner, and the value back
            work.send(axis.mesh_axis, "send", tied)
        _send_by_step(work, estimate.footprint, lowered, sharded=sharded)
        highest = peaks_of_rank((action for *_, action in row), stages)
        ranks.append(
            attrs.evolve(
                estimate,
                peak=max(highest.values(), key=lambda peak: peak.total),
                phases={**estimate.phases, **{phase: peak.total for phase, peak in highest.items()}},
                work=work,
                idle=timing.idle,
            )
        )
    largest = max(ranks, key=lambda each: each.total)
    largest.work.flops = max(each.work.flops for each in ranks)  # the others wait for the busiest one
    return largest


def _blocks_of(split: Any, number: int) -> tuple[tuple[type, int], ...]:
    return tuple(
        (type(each.module), sum(param.numel() for param in each.module.parameters()))
        for each in split.elements
        if each.stage == number
    )


def _planned(
    step: StepLike,
    model: Distributed,
    optimizer: OptimizerLike | None,
    ranks: int,
    per_machine: int | None,
    frozen: str | Callable[..., bool] | Iterable[str | Callable[..., bool]],
) -> tuple[Chosen, Planned]:
    """The plan of a train step on ranks that do not exist, and what it is of."""
    check_ranks(ranks, f"{_WHERE}(ranks=)")
    local = ranks if per_machine is None else per_machine
    check_machines(ranks, local, f"{_WHERE}(per_machine=)")
    world = absent_world(ranks, local, "fa.estimate")
    chosen = choose(step, model, ranks, {}, trains=True)
    axes = chosen.strategy
    mesh = Mesh(world=world, degrees=resolve(axes.degrees(), ranks, str(axes)))
    return chosen, planned(chosen, optimizer, mesh, frozen=frozen)


def _of(
    built: Built,
    strategy: Strategy,
    planned_step: Planned,
    simulated: Spec,
    batch: Tree,
    most: int,
    stage: OneStage | None,
) -> TrainingEstimate:
    spec, lowered = planned_step.spec, planned_step.lowered(None)
    degrees = spec.mesh.degrees
    freeze(built, spec.frozen)
    require(
        any(param.requires_grad for _, param in built.named("parameters")),
        "no parameter is left to train",
        f"{_WHERE}(frozen=)",
        "fewer patterns in frozen=",
    )
    if lowered.settings.casts:
        for module in built.modules.values():
            _torch.cast_floats(module, lowered.settings.precision.param)
    layout = planned_step.plan.layout.replace(" (cpu)", "")
    fsdp = next((axis for axis in strategy.axes if isinstance(axis, Fsdp)), None)
    if stage is not None:
        stage.find(built, degrees[stage.axis.mesh_axis])
        fsdp = None if fsdp is None else attrs.evolve(fsdp, ignore=(*fsdp.ignore, *stage.others))
    home = None if stage is None else stage.home
    sizes = footprint_of(built, strategy, degrees, spec.optimizers, layout, home=home)
    averaged = fsdp is None and stage is None and spec.mesh.gradient_size > 1
    account = Account() if fsdp is None else Account(_axis_of(simulated.mesh))
    _hold(account, built, sizes, lowered, batch)
    account.hold(0 if stage is None else stage.copies, "parameters")
    account.hold(sizes.gradients if averaged else 0, GRADIENTS)
    hooks = apply_axes(built, simulated, lowered.modules)
    inside: dict[str | None, list[str]] = {key: [] for key in built.modules}
    for key, module in built.modules.items():
        for name, hook in hooks[key]:
            if isinstance(hook, HasUnits):
                inside[key] += [unit for unit, _ in find_units(module, hook.units, name)]
            hook.on_module(module, f"transform {name}")
    plan = TracePlan(
        built=built, lowered=lowered, batch=batch, spec=simulated, fsdp=fsdp, averaged=averaged,
        inside=inside, most=most, stage=stage,
    )  # fmt: skip
    left_out = trace(plan, account)
    phases = {phase: peak.total for phase, peak in account.highest.items() if phase}
    if stage is None:
        _send_by_step(account.work, sizes, lowered, sharded=fsdp is not None)
    return TrainingEstimate(
        footprint=sizes,
        peak=account.top,
        phases=phases,
        left_out=left_out,
        work=account.work,
        degrees=degrees,
        offloads=fsdp is not None and fsdp.offload,
    )


def _hold(account: Account, built: Built, sizes: Footprint, lowered: Lowered, batch: Tree) -> None:
    """The bytes that live for all of a step."""
    tensors = [value for value in _torch.tree_leaves(batch) if isinstance(value, torch.Tensor)]
    account.hold(sizes.parameters, "parameters")
    account.hold(sizes.slots or 0, "optimizer")
    buffers = [value for _, value in built.named("buffers")]
    averaged = [value for value in buffers if lowered.settings.ema_buffers and value.is_floating_point()]
    account.hold(_averages(sizes, averaged) if lowered.settings.ema_decay is not None else 0, "averages")
    account.hold(sum(value.nbytes for value in buffers), "model")
    account.hold(sum(value.nbytes for value in tensors), "batch")


def _averages(sizes: Footprint, buffers: list[torch.Tensor]) -> int:
    """The bytes of the averages of parameters and buffers, which have 32 bits at least."""
    counts = [(math.prod(each.part), each.dtype) for each in sizes.placed if each.trained]
    counts += [(value.numel(), value.dtype) for value in buffers]
    return sum(count * torch.promote_types(dtype, torch.float32).itemsize for count, dtype in counts)


def _send_by_step(work: Work, sizes: Footprint, lowered: Lowered, *, sharded: bool) -> None:
    """Count the collectives that follow the backward pass. The trace met those of shards and of `tp`."""
    settings = lowered.settings
    reduce = settings.precision.reduce
    for row in sizes.traffic:
        gradients = row.what.startswith("gradients")
        if row.per != "step" or (sharded and gradients and row.axis in ("shard", "dp_replicate")):
            continue
        size = row.size
        if gradients and reduce in (torch.bfloat16, torch.float16) and row.axis == "loss":
            size = size * reduce.itemsize // settings.precision.param.itemsize
        times = max(1, settings.micro_batches) if settings.sync_each and gradients else 1
        work.send(row.axis, row.kind, size * times, row.count * times)


def _axis_of(mesh: Mesh) -> Callable[[str], str]:
    """The mesh axis of a process group under fsdp. FSDP2 makes groups of its own if it reshards partly."""
    names = [name for name in mesh.shown.mesh_dim_names if name != mesh.shard_dim]
    axes = {mesh.shown.get_group(name).group_name: name if name == "dp_replicate" else "tp" for name in names}
    return lambda group: axes.get(group, "shard")


@contextlib.contextmanager
def _on_simulated_ranks(spec: Spec, strategy: Strategy) -> Generator[Spec]:
    """The train step on a mesh of ranks that are simulated: all under fsdp, else those that cut the model."""
    degrees = {name: size for name, size in spec.mesh.degrees.items() if name != "pp"}
    if not any(isinstance(axis, Fsdp) for axis in strategy.axes):
        cutting = [getattr(axis, "mesh_axis", "") for axis in strategy.axes if isinstance(axis, Rewrites)]
        degrees = {name: size for name, size in degrees.items() if name in cutting and size > 1}
    if not degrees:
        yield spec
        return
    if dist.is_initialized():
        raise CapabilityError(
            f"the axis {next(iter(degrees))} needs a process group of its own here, and one runs already",
            where=_WHERE,
            fix="call it outside of a job, or run `fnaccel estimate`",
        )
    with simulate(ranks=math.prod(degrees.values())) as world:
        yield attrs.evolve(spec, mesh=build(world, degrees, strategy.follows(), strategy.apart()))
