"""`assemble`: build the modules, the engine and the optimizers of a train step, as `init` does."""

from __future__ import annotations

import attrs

from fnaccel.engine.engine import Engine
from fnaccel.errors import ArgumentError, CapabilityError
from fnaccel.models._torch import cast_floats
from fnaccel.models.building import Built, check_memory, check_patched, check_sparse, freeze, release
from fnaccel.models.constant_buffers import check_not_trained
from fnaccel.models.gradient_hooks import check_hooks_run, count_hooks
from fnaccel.models.note import Note
from fnaccel.models.synced_norm import connect
from fnaccel.optim.foreign import TorchKernel
from fnaccel.optim.several import optimizers_of
from fnaccel.program.axes_applied import apply_axes
from fnaccel.program.instance import Instance
from fnaccel.program.lower import Lowered
from fnaccel.program.model_notes import model_notes
from fnaccel.program.parameter_averages import average_of
from fnaccel.step.callables import plan_text
from fnaccel.step.spec import Spec
from fnaccel.strategies.axis import Build, make_engine
from fnaccel.strategies.runtime import Delegation


def assemble(
    spec: Spec, lowered: Lowered, where: str, seed: int, delegation: Delegation | None = None
) -> Instance:
    """Build modules, engine and optimizers. A failure leaves the modules free."""
    builds: list[Built] = []
    settings, trains = lowered.settings, spec.optimizers is not None
    notes: tuple[Note, ...] = ()
    arrived = 0

    def prepare(built: Built) -> None:
        nonlocal notes, arrived
        builds.append(built)
        notes, arrived = model_notes(built.modules, spec), count_hooks(built.modules)
        if not trains:
            for _, param in built.named("parameters"):
                param.requires_grad_(False)
        freeze(built, spec.frozen)
        if trains:
            check_not_trained(built.modules, spec.frozen)
            check_memory(built)
            kernels = [
                each.kernel for update in (spec.optimizers or {}).values() for each in optimizers_of(update)
            ]
            foreign = any(isinstance(kernel, TorchKernel) for kernel in kernels)
            if not foreign or "dp_shard" in spec.mesh.degrees:
                check_sparse(built)
            if settings.captured:
                check_hooks_run(built.modules, captured=True, shards=False)
        if trains and not any(p.requires_grad for _, p in built.named("parameters")):
            raise ArgumentError(
                "no parameter is left to train: "
                + (f"frozen={plan_text(spec.frozen)} names all" if spec.frozen else "none takes a gradient"),
                where="fa.train_step",
                fix="freeze fewer, or pass optimizer=None for a model that is only looked at or lent",
            )
        if settings.casts:
            for module in built.modules.values():
                cast_floats(module, settings.precision.param)
        hooks = apply_axes(built, spec, lowered.modules)
        for key, module in built.modules.items():
            for name, hook in hooks[key]:
                hook.on_module(module, f"transform {name}")
                check_patched(built, f"transform {name}")

    try:
        engine, built = make_engine(
            Build(spec=spec, settings=settings, seed=seed, prepare=prepare, delegation=delegation)
        )
        if engine.hooks.init is not None and engine.name in {name for name, _ in lowered.inits}:
            raise CapabilityError(
                f"a transform and the strategy both keep a state named {engine.name!r}",
                where="state.transforms",
                fix="give the transform another name: fa.Transform(name=...)",
            )
        apart = next((axis.maker for axis in spec.strategy.axes if not axis.averages), "")
        if trains and apart and engine.layout.next_whole is None and spec.mesh.loss_size > 1:
            raise CapabilityError(
                f"{apart} averages no gradients, and does not say when its ranks hold the same values",
                where=f"strategy {spec.strategy}",
                fix="give the engine next_whole: whole_engine(..., next_whole=lambda step: ...)",
            )
        engine = _with_averages_and_norms(engine, lowered)
        return Instance(engine, built, spec, lowered, where, notes, arrived)
    except BaseException:
        for built in builds:
            release(built)
        raise


def _with_averages_and_norms(engine: Engine, lowered: Lowered) -> Engine:
    """The engine with averages, and with norms that are told which micro-batches count."""
    tell = connect(engine.layout.modules, engine.layout.mesh.group("gradient"))
    if tell is not None:
        engine = attrs.evolve(engine, hooks=attrs.evolve(engine.hooks, micro_batch=tell))
    if lowered.settings.ema_decay is not None:
        engine = attrs.evolve(engine, averages=tuple(average_of(leaf.shard) for leaf in engine.layout.leaves))
    return engine
