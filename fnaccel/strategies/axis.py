"""How a product of axes becomes an engine: axes change modules, and one of them finishes the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import attrs

from fnaccel.engine.engine import Engine
from fnaccel.errors import CapabilityError
from fnaccel.models.building import Built
from fnaccel.step.settings import Settings
from fnaccel.step.spec import Spec
from fnaccel.strategies.runtime import Delegation
from fnaccel.strategies.strategy import Axis, Strategy
from fnaccel.world.mesh import AXES, Mesh


@attrs.frozen(kw_only=True)
class Build:
    """The parts of an engine.

    Attributes:
        spec: the train step.
        settings: of its step.
        seed: of initial values.
        prepare: freezes parameters, casts them, lets axes and MODULE transforms change the modules, in that
            order. It is called once, before the modules are moved or sharded.
        delegation: the transforms that a runtime carries out, and its configuration.
    """

    spec: Spec
    settings: Settings
    seed: int
    prepare: Callable[[Built], None]
    delegation: Delegation | None = None


Finisher = Callable[[Build, Any], tuple[Engine, Built]]

_finishers: dict[type | None, tuple[Finisher, tuple[type, ...] | None]] = {}
"""The finishers, and the other axes that each takes: None for the engine of any."""


def finisher(
    axis: type | None, *, takes: tuple[type, ...] = (), around: bool = False
) -> Callable[[Finisher], Finisher]:
    """Decorator: this function makes the engine of products with an axis of this class.

    Args:
        axis: the class of the record that it is called with, or None for products without such an axis.
        takes: other axes that have a finisher, and that this one carries out as well.
        around: whether it adds to the engine of all other axes, `engine_without`.
    """

    def register(fn: Finisher) -> Finisher:
        _finishers[axis] = fn, None if around else takes
        return fn

    return register


@runtime_checkable
class Rewrites(Protocol):
    """An axis that changes the modules. Another one makes the engine."""

    def apply(self, built: Built, mesh: Mesh) -> None:
        """Change modules in place, after they were built and before they are moved or sharded."""
        ...


def finishing_axis(strategy: Strategy) -> Any:
    """The axis that makes the engine of a product. None if each rank holds the whole model.

    Raises:
        CapabilityError: none takes the others, or the options of one would have no meaning.
    """
    finishing = [axis for axis in strategy.axes if type(axis) in _finishers]
    for axis in strategy.axes:
        if axis not in finishing and not isinstance(axis, Rewrites):
            raise CapabilityError(
                f"{axis.maker} neither changes modules nor makes an engine",
                where=f"strategy {strategy}",
                fix="give the record a method apply(built, mesh), or register a finisher: docs/extending.md",
            )
    if not finishing:
        return None
    around = [axis for axis in finishing if _finishers[type(axis)][1] is None]
    if around:  # the stages of a pipeline are within each replica of those that train apart
        return max(around, key=lambda axis: AXES.index(axis.mesh_axis) if axis.mesh_axis in AXES else -1)
    for axis in finishing:
        taken = [other for other in finishing if type(other) is not type(axis)]
        if all(type(other) in (_finishers[type(axis)][1] or ()) for other in taken):
            for other in taken:
                _check_plain(other, axis, strategy)
            return axis
    able = {kind for _, takes in _finishers.values() for kind in takes or ()} | {
        kind for kind, (_, takes) in _finishers.items() if takes
    }
    single = [axis.maker for axis in finishing if type(axis) not in able]
    raise CapabilityError(
        f"nothing runs {strategy}: these axes have no interpreter together",
        where="fa.train_step",
        fix=f"use {' or '.join(single)} by itself: it copies and shards on its own"
        if single
        else "multiply ddp and fsdp, with a degree each",
    )


def _check_plain(axis: Axis, by: Axis, strategy: Strategy) -> None:
    if attrs.evolve(type(axis)(), degree=axis.degree) != axis:
        raise CapabilityError(
            f"the options of {axis.maker} have no meaning if {by.maker} averages the gradients",
            where=f"strategy {strategy}",
            fix=f"write {axis.maker}({axis.degree}) without options beside {by.maker}",
        )


def make_engine(build: Build) -> tuple[Engine, Built]:
    """The engine of a train step: axes that rewrite modules have their turn in `build.prepare`."""
    axis = finishing_axis(build.spec.strategy)
    if axis is None and build.spec.mesh.gradient_size > 1:
        axis = _averaging()
    finish, _ = _finishers[None if axis is None else type(axis)]
    prepared = False

    def prepare(built: Built) -> None:
        nonlocal prepared
        prepared = True
        build.prepare(built)

    result = finish(attrs.evolve(build, prepare=prepare), axis)
    if not isinstance(result, tuple) or [type(part) for part in result] != [Engine, Built]:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CapabilityError(
            f"the finisher {getattr(finish, '__qualname__', finish)} returned {type(result).__name__}",
            where=f"strategy {build.spec.strategy}",
            fix="return two values: the engine, and the Built of construct(...)",
        )
    if not prepared:
        raise CapabilityError(
            f"the finisher {getattr(finish, '__qualname__', finish)} left out the MODULE transforms",
            where=f"strategy {build.spec.strategy}",
            fix="call place(built, build) before the engine is made: docs/extending.md",
        )
    return result


def engine_without(axis: Axis, build: Build) -> tuple[Engine, Built]:
    """The engine of the other axes of a product. It averages gradients over `mesh["gradient"]`."""
    others = Strategy(tuple(other for other in build.spec.strategy.axes if other is not axis))
    return make_engine(attrs.evolve(build, spec=attrs.evolve(build.spec, strategy=others)))


def _averaging() -> Axis:
    """The axis that averages gradients over ranks which hold the whole model, of degree 1."""
    kind = next(
        kind for kind in _finishers if kind is not None and getattr(kind, "mesh_axis", "") == "dp_replicate"
    )
    return kind(1)
