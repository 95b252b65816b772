"""Apply the axes that change modules. Units and frozen parameters stay those of the whole model.

A tensor axis leaves a part of each parameter in the modules, and may put other modules or parameters in the
place of the old ones. Units by size or class, and names of frozen parameters, have one meaning on all ranks
and for all strategies: that of the model as the user wrote it. So they are found before, and kept by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs

from fnaccel.errors import CapabilityError
from fnaccel.models.blocks import HasUnits, NamedUnits, find_units
from fnaccel.models.building import Built
from fnaccel.step.spec import Spec
from fnaccel.step.step import ModuleHook
from fnaccel.strategies.axis import Rewrites
from fnaccel.strategies.strategy import Axis

Hooks = Sequence[tuple[str, ModuleHook]]


def apply_axes(built: Built, spec: Spec, hooks: Hooks) -> dict[str | None, Hooks]:
    """Apply the axes of a strategy to modules, and return the MODULE hooks to run on each model afterwards.

    Args:
        built: the whole modules. Units of fsdp are noted in it.
        spec: the train step.
        hooks: (name, hook) of its MODULE transforms. Those with units get the units of the whole model.

    Raises:
        ArgumentError: units that the whole model does not have.
        CapabilityError: an axis gives parameters other names.
    """
    rewriting = [axis for axis in spec.strategy.axes if isinstance(axis, Rewrites)]
    if not rewriting:
        return dict.fromkeys(built.modules, hooks)
    trained = {name: param.requires_grad for name, param in built.named("parameters")}
    chosen: dict[str | None, Hooks] = {}
    for key, module in built.modules.items():
        chosen[key] = [(name, _named(hook, module, f"transform {name}")) for name, hook in hooks]
        for axis in spec.strategy.axes:
            if isinstance(axis, HasUnits):
                built.units[key] = _named(axis, module, "fa.fsdp(units=...)").units
    for axis in rewriting:
        axis.apply(built, spec.mesh)
        _check_names(built, trained, cast("Axis", axis))
    for name, param in built.named("parameters"):  # an axis may have made a new parameter
        param.requires_grad_(trained.get(name, param.requires_grad))
    return chosen


def _check_names(built: Built, before: Mapping[str, bool], axis: Axis) -> None:
    new = sorted({name for name, _ in built.named("parameters")} - set(before))
    if new:
        raise CapabilityError(
            f"{axis.maker} names a parameter {new[0]}, which the model does not have",
            where=f"strategies: {axis.maker}",
            fix="keep the names of parameters in apply(built, mesh): states and checkpoints have them",
        )


def _named(record: Any, module: Any, where: str) -> Any:
    """A record whose units are names. A record without units as it is."""
    if not isinstance(record, HasUnits):
        return record
    names = (name for name, _ in find_units(module, record.units, where))
    return attrs.evolve(cast("Any", record), units=NamedUnits(tuple(names)))
