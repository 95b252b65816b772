"""`Spec`: the parts of a train step before anything is built, and the protocols by which they speak."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

from fnaccel.errors import CapabilityError
from fnaccel.step.step import Step, Transform
from fnaccel.tree import Tree
from fnaccel.world.mesh import Mesh

if TYPE_CHECKING:
    from fnaccel.engine.updater import Optimizers
    from fnaccel.strategies.strategy import Strategy

Rng = Literal["fold", "stream"]


@attrs.frozen(kw_only=True)
class Spec:
    """A train step before anything is built.

    Attributes:
        step: the loss and its transforms.
        model: a factory, a module, or a dict of them.
        strategy: of the model.
        optimizers: by model, or None if nothing is trained.
        frozen: selections of the parameters that are not trained.
        rng: the source of random numbers.
        mesh: the mesh of the ranks.
        runtime: the runtime that carries out the update, or "".
    """

    step: Step
    model: Any
    strategy: Strategy
    optimizers: Optimizers | None
    mesh: Mesh
    frozen: tuple[str | Callable[[str, Any], bool], ...] = ()
    rng: Rng = "fold"
    runtime: str = ""

    def speakers(self) -> list[Any]:
        """The records of transforms and axes, in the order in which the plan asks them."""
        return [*(t.apply for t in self.step.transforms), *self.strategy.axes]


@runtime_checkable
class Resolves(Protocol):
    """A record of a transform that left a choice open until strategy and optimizers are known."""

    def resolved(self, spec: Spec) -> Transform:
        """The transform, its choice made. Raises if it has none that can be."""
        ...


@runtime_checkable
class Checks(Protocol):
    """A record that checks a train step before anything is built."""

    def check(self, spec: Spec) -> None:
        """Raise if the train step can't be."""
        ...


@runtime_checkable
class PlanNotes(Protocol):
    """A record that adds notes to the plan."""

    def plan_notes(self, spec: Spec) -> list[str]:
        """Notes for the plan. Raises if the train step could not be carried out."""
        ...


@runtime_checkable
class ObstructsCapture(Protocol):
    """A record that may keep a step from being captured as one graph."""

    def obstacle_to_capture(self, spec: Spec) -> str:
        """The obstacle as a clause, or "" without one."""
        ...


class LossPart(Protocol):
    """This rank's part of a loss that several ranks compute together."""

    def cut(self, batches: Sequence[Tree]) -> tuple[list[Any], contextlib.AbstractContextManager[Any]]:
        """This rank's part of each batch, and the context of the forward and backward passes."""
        ...

    def checked(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A loss or metric function that raises if its weight counts parts of the loss more than once."""
        ...

    def checked_weight(self, weight_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same for a function of `fa.with_weight`."""
        ...


@runtime_checkable
class SplitsLoss(Protocol):
    """An axis along which ranks compute parts of one loss, each from its part of every batch."""

    def part_of(self, spec: Spec) -> LossPart | None:
        """This rank's part. None if one rank computes all of it."""
        ...


def loss_part(spec: Spec) -> LossPart | None:
    """This rank's part of the loss. None if no axis splits it.

    Raises:
        CapabilityError: several axes split it.
    """
    axes: list[Any] = [axis for axis in spec.strategy.axes if isinstance(axis, SplitsLoss)]
    if len(axes) > 1:
        raise CapabilityError(
            f"{' and '.join(axis.maker for axis in axes)} both split the loss",
            where=f"strategy {spec.strategy}",
            fix="use one of the two",
        )
    return axes[0].part_of(spec) if axes else None


def resolve(spec: Spec) -> Spec:
    """A spec whose transforms have made the choices that they left open."""
    transforms = tuple(
        t.apply.resolved(spec) if isinstance(t.apply, Resolves) else t for t in spec.step.transforms
    )
    return attrs.evolve(spec, step=Step(spec.step.loss_fn, transforms))


def check(spec: Spec) -> None:
    """Let every transform and axis check a train step."""
    for record in spec.speakers():
        if isinstance(record, Checks):
            record.check(spec)


def plan_notes(spec: Spec) -> list[str]:
    """The notes of optimizers, transforms and axes, each sentence once."""
    notes: dict[str, None] = {}
    for optimizer in (spec.optimizers or {}).values():
        notes.update(dict.fromkeys(optimizer.plan_notes(spec)))
    for record in spec.speakers():
        if isinstance(record, PlanNotes):
            notes.update(dict.fromkeys(record.plan_notes(spec)))
    return list(notes)


def obstacle_to_capture(spec: Spec) -> str:
    """The first obstacle to capturing a step as one graph, or ""."""
    obstacles = (
        record.obstacle_to_capture(spec) for record in spec.speakers() if isinstance(record, ObstructsCapture)
    )
    return next((obstacle for obstacle in obstacles if obstacle), "")
