"""From the arguments of `fa.train_step` to a spec and a plan: all checks, and nothing built."""

from __future__ import annotations

import glob
from collections.abc import Iterable

import attrs
from torch import nn

from fnaccel.collectives import gather_objects
from fnaccel.engine.updater import by_model, check_own
from fnaccel.errors import PlanMismatchError, as_names
from fnaccel.models.constant_buffers import check_not_trained
from fnaccel.models.parameter import Select
from fnaccel.optim.several import OptimizerLike
from fnaccel.program.launcher_flags import Chosen
from fnaccel.program.lower import Lowered, lower
from fnaccel.program.plan import Plan, make_plan
from fnaccel.step.spec import LossPart, Rng, Spec, resolve
from fnaccel.strategies.runtime import Delegation, check_device, delegate
from fnaccel.strategies.strategy import Strategy
from fnaccel.world.devices import check_precision
from fnaccel.world.mesh import Mesh, build
from fnaccel.world.mesh import resolve as resolve_degrees
from fnaccel.world.world import World


@attrs.frozen(kw_only=True)
class Planned:
    """A train step that has passed all checks, and the work that a runtime carries out."""

    spec: Spec
    plan: Plan
    delegation: Delegation | None

    def lowered(self, part: LossPart | None) -> Lowered:
        """Its step, ready for an engine."""
        lowered = lower(self.spec.step, () if self.delegation is None else self.delegation.names, part)
        check_precision(self.spec.mesh.world.device, lowered.settings.precision.compute)
        return lowered


def mesh_of(strategy: Strategy, world: World) -> Mesh:
    """The ranks of a world over the axes of a strategy, with their process groups. All ranks call it.

    Raises:
        AxisProductError: they do not fit. Of `local()` it is `init` that says so.
        PlanMismatchError: ranks hold strategies of different axes, whose groups would wait for each other.
    """
    degrees = resolve_degrees(strategy.degrees(), world.size, str(strategy)) if strategy.axes else {}
    if world.calls is None or not degrees:
        return build(world, degrees, strategy.follows(), strategy.apart())
    return world.calls.run("fa.train_step", _agreed_mesh, strategy, degrees, world)


def _agreed_mesh(strategy: Strategy, degrees: dict[str, int], world: World) -> Mesh:
    rows = gather_objects((degrees, str(strategy)), world=world)
    for rank, (others, described) in enumerate(rows):
        if others != rows[0][0]:
            raise PlanMismatchError(
                f"ranks hold different strategies: rank 0 has {rows[0][1]}, rank {rank} has {described}",
                where="fa.train_step",
                fix="distribute the model with the same strategy on every rank",
            )
    return build(world, degrees, strategy.follows(), strategy.apart())


def planned(
    chosen: Chosen,
    optimizer: OptimizerLike | None,
    mesh: Mesh,
    *,
    frozen: Select | Iterable[Select] = (),
    rng: Rng = "fold",
) -> Planned:
    """Validate the arguments of `fa.train_step` on a mesh, which need not have ranks. Raises as it does."""
    model = chosen.model
    keys: list[str | None] = list(model) if isinstance(model, dict) else [None]
    optimizers = None if optimizer is None else by_model(optimizer, keys)
    without = [] if optimizers is None else [key for key in keys if key not in optimizers]
    spec = resolve(
        Spec(
            step=chosen.step,
            model=model,
            strategy=chosen.strategy,
            optimizers=optimizers,
            frozen=(*as_names(frozen), *(f"{glob.escape(str(key))}/*" for key in without)),
            rng=rng,
            mesh=mesh,
        )
    )
    check_device(spec)
    if optimizers is not None:  # a factory's model is checked when it is built
        parts = model if isinstance(model, dict) else {None: model}
        check_not_trained({k: m for k, m in parts.items() if isinstance(m, nn.Module)}, spec.frozen)
    delegation = delegate(spec)
    if delegation is not None:
        spec = attrs.evolve(spec, step=delegation.step, runtime=delegation.by)
    else:
        check_own(optimizers or {})
    described = optimizers if optimizers and None not in optimizers else optimizer
    plan = make_plan(spec, described, delegation)
    plan = attrs.evolve(plan, notes=(*chosen.notes, *plan.notes))
    return Planned(spec=spec, plan=plan, delegation=delegation)
