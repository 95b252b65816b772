"""A step is data: a loss function and the frozen transforms that were applied to it.

Only description lives here. Validation and order are in `plan`, lowering is in `program`.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, runtime_checkable

import attrs
import torch
from torch import nn

from fnaccel import tree
from fnaccel.errors import (
    ArgumentError,
    LossError,
    RepeatedTransformError,
    UnknownNameError,
    as_names,
    nearest,
    require,
)
from fnaccel.step.callables import plan_text, title
from fnaccel.step.loss import Mean, Scalar
from fnaccel.step.loss_info import LossInfo
from fnaccel.step.settings import Configures, Settings
from fnaccel.tree import Tree

if TYPE_CHECKING:
    from fnaccel.engine.engine import Engine
    from fnaccel.engine.gradients import Gradients

RESERVED = frozenset({"loss", "weight", "lr", "grad_norm", "skipped", "loss_scale", "recompilations"})
"""Metrics that a step reports by itself."""


class Phase(enum.IntEnum):
    """When a transform acts. Across phases the library orders. Within one phase, written order holds.

    Example:
        >>> [phase.name for phase in fa.Phase]
        ['MODULE', 'FORWARD', 'BACKWARD', 'GRADS', 'UPDATE', 'CALL']
    """

    MODULE = 0
    FORWARD = 1
    BACKWARD = 2
    GRADS = 3
    UPDATE = 4
    CALL = 5


class Capability(enum.StrEnum):
    """A capability of a strategy that a transform may need.

    Example:
        >>> def nonnegative(params, own, info):
        ...     for value in params.values():
        ...         value.clamp_(min=0)
        ...     return own
        >>> needs = {fa.transforms.Capability.PARAMETERS}
        >>> clamp = fa.Transform("clamp", fa.Phase.UPDATE, apply=nonnegative, needs=needs)
    """

    MODULES = "modules"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    SECOND_GRADIENT = "second gradient"
    COMPILE_BLOCK = "compile block"
    COMPILE_LOSS = "compile loss"
    COMPILE_STEP = "compile step"


EVERYTHING = frozenset(Capability)

LossFn = Callable[..., Mean | Scalar | tuple[Mean | Scalar, Any]]
"""`loss_fn(model, batch[, given][, info=])`. Returns `fa.Mean`, a scalar, or (scalar, aux)."""


@runtime_checkable
class ModuleHook(Protocol):
    """A MODULE record: changes modules in place, before they are sharded."""

    def on_module(self, module: nn.Module, where: str) -> None:
        """Change `module`. `where` is the location in error messages."""
        ...


@runtime_checkable
class GradientHook(Protocol):
    """A GRADS record of the library: works on the local gradients."""

    def on_gradients(self, grads: Gradients, state: Tree, info: Info) -> Any:
        """Change `grads` and return the transform's next state."""
        ...


@runtime_checkable
class UpdateHook(Protocol):
    """An UPDATE record of the library: acts after the parameters changed."""

    def on_update(self, engine: Engine, state: Tree, info: Info) -> Any:
        """Return the transform's next state. `info.skip` is 1 if the update was skipped."""
        ...


# a dataclass: no attrs value can be built inside compiled code
@dataclass(frozen=True, kw_only=True)
class Info:
    """The call in which a GRADS or UPDATE transform acts.

    Attributes:
        step: calls before this one (an int, or a 0-d tensor in a captured step).
        updates: updates applied before this one (an int, or a tensor if they may be skipped).
        params: parameters by canonical name, those of several models as `"model/name"`, as gradients are. The
            next update changes them in place: clone what you keep.
        skip: 0-d tensor, 1 if the update is skipped. None if updates are never skipped. For GRADS transforms
            as far as it is decided: gradients that are not finite come first. The state that a transform of
            yours returns is dropped if the update is skipped.
        metrics: those of this step so far: `loss`, `weight`, and those of transforms before this one.
        gradients_at: `gradients_at(params, loss=None)` returns the gradients of the same micro-batches, with
            the same random numbers, at other values of the trained parameters: both by name. `loss` is
            another loss function, under the same transforms. The update goes on as if it had not been
            called, in about twice the time. A transform that calls it says
            `needs="second gradient"`, so that the plan refuses a strategy that can't.

    Example:
        >>> def watch(params, own, info):
        ...     info.record("largest", max(value.abs().max() for value in params.values()))
        ...     return own
        >>> step = fa.Transform("watch", fa.Phase.UPDATE, apply=watch)(loss_fn)
        >>> train_step = fa.train_step(step, model=fa.distribute(GPT, "local"), optimizer=fa.sgd(0.1))
        >>> state, metrics = train_step(train_step.init(), batch)
        >>> metrics["largest"].shape
        torch.Size([])
    """

    step: int | torch.Tensor
    updates: int | torch.Tensor
    params: Any
    skip: torch.Tensor | None = None
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    gradients_at: Callable[..., dict[str, Any]] | None = None

    def record(self, name: str, value: Tree) -> None:
        """Put a value into the metrics of the step. Sharded values are gathered, so every rank calls it.

        Raises:
            LossError: the step itself reports a metric of that name.
        """
        if name in RESERVED and name != "grad_norm":  # which clipping records
            raise LossError(
                f"a hook records {name!r}, which the step itself reports",
                where=f"info.record({name!r}, value)",
                fix="give it another name",
            )
        plain = type(value) in (torch.Tensor, float, int)
        self.metrics[name] = value if plain else tree.map(tree.whole, value)


def _as_phase(phase: object) -> Phase:
    require(
        phase in list(Phase), f"{phase!r} is no phase of a step", "fa.Transform", "name one: fa.Phase.GRADS"
    )
    return Phase(cast("int", phase))


def _as_capabilities(names: Iterable[str] | str) -> frozenset[Capability]:
    for name in as_names(names):
        if name not in list(Capability):
            fix = nearest(name, map(str, Capability))
            raise UnknownNameError(f"there is no capability {name!r}", where="fa.Transform(needs=)", fix=fix)
    return frozenset(map(Capability, as_names(names)))


@attrs.frozen
class Transform:
    """One record in the description of a step. Users add their own transforms with it.

    Args:
        name: unique in a step. Its state is `state.transforms[name]`.
        phase: when the transform acts, and the signature of `apply`:
            MODULE   `apply(model) -> None`, in place, before the model is sharded,
            FORWARD  `apply(loss_fn) -> loss_fn`,
            GRADS    `apply(grads, own, info) -> (grads, own)`, dicts of tensors by parameter name,
            UPDATE   `apply(params, own, info) -> own`, after the update, parameters by name,
            CALL     `apply(call) -> call`, around `call(state, batch) -> (state, metrics)`.
        init: `init(params) -> own`, the transform's own state, a pytree of tensors and numbers. All ranks
            hold the same, or DTensors.
        needs: capabilities that the strategy must have: one, or several. A function of the phase GRADS needs
            `"gradients"` in any case.
        repeatable: whether a step may hold several. Later ones are called `name.1`, `name.2`, and so on.

    Raises:
        ArgumentError: `apply` can't be called, or the phase is no phase, or the engine's own (BACKWARD).
        UnknownNameError: there is no such capability.

    Example:
        >>> def add_noise(grads, own, info):
        ...     return {name: grad + 0.01 * torch.randn_like(grad) for name, grad in grads.items()}, own
        >>> noise = fa.Transform("noise", fa.Phase.GRADS, apply=add_noise)
        >>> step = noise(loss_fn)
        >>> train_step = fa.train_step(step, model=fa.distribute(GPT, "local"), optimizer=fa.sgd(0.1))
        >>> state, metrics = train_step(train_step.init(), batch)
    """

    is_transform: ClassVar[bool] = True
    name: str
    phase: Phase = attrs.field(converter=_as_phase)
    apply: Any = attrs.field(kw_only=True)
    init: Callable[[Any], Any] | None = attrs.field(default=None, kw_only=True)
    needs: frozenset[Capability] = attrs.field(factory=frozenset, converter=_as_capabilities, kw_only=True)
    repeatable: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        named = isinstance(self.name, str) and self.name  # pyright: ignore[reportUnnecessaryIsInstance]
        require(bool(named), f"{self.name!r} is no name of a transform", "fa.Transform", "give a text")
        record = attrs.has(type(self.apply))
        require(
            record or callable(self.apply),
            f"transform {self.name!r} has apply={self.apply!r}, which can't be called",
            "fa.Transform",
            f"give a function, as the phase {self.phase.name} calls it",
        )
        require(
            record or self.phase is not Phase.BACKWARD,
            f"transform {self.name!r} asks for the BACKWARD phase, which is the engine's own",
            "fa.Transform",
            "act on the loss (FORWARD) or on the gradients (GRADS)",
        )
        if self.phase is Phase.GRADS and not isinstance(self.apply, GradientHook):
            object.__setattr__(self, "needs", self.needs | {Capability.GRADIENTS})

    def __call__(self, step: StepLike) -> Step:
        """Append this record to a step or to a plain loss function."""
        return append(step, self)

    def describe(self) -> str:
        """The text beside the name in the plan."""
        if hasattr(self.apply, "describe"):
            return str(self.apply.describe())
        if attrs.has(type(self.apply)):
            return describe_fields(self.apply)
        return title(self.apply)


def describe_fields(record: object) -> str:
    """`a=1, b='x'` for a frozen record."""
    pairs = ((f.name.lstrip("_"), getattr(record, f.name)) for f in attrs.fields(type(record)))
    return ", ".join(f"{name}={_short(value)}" for name, value in pairs)


def _short(value: Tree) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    return str(value) if str(value).startswith("torch.") else plan_text(value)


@attrs.frozen
class Step:
    """A loss function and its transforms, in the order they were written.

    Calling it runs the forward under its FORWARD transforms, for debugging.

    Example:
        >>> step = fa.clip_norm(fa.accumulate(loss_fn, 2), 1.0)
        >>> [transform.name for transform in step.transforms]
        ['accumulate', 'clip_norm']
        >>> type(step(GPT(), batch)).__name__
        'Mean'
    """

    loss_fn: Callable[..., Any]
    transforms: tuple[Transform, ...] = ()

    def __call__(self, model: object, batch: Tree, *given: Any, info: LossInfo | None = None) -> Any:
        """The loss of one batch on a plain module: no gradients are averaged, nothing is updated."""
        fn = self.loss_fn if info is None else functools.partial(self.loss_fn, info=info)
        return self.forward(fn)(model, batch, *given)

    def forward(self, loss_fn: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The loss function (or another) under its FORWARD transforms, the first written innermost."""
        fn = self.loss_fn if loss_fn is None else loss_fn
        for transform in self.transforms:
            if transform.phase is Phase.FORWARD:
                fn = transform.apply(fn)
                require(
                    callable(fn),
                    f"transform {transform.name!r} returned {type(fn).__name__}, not a loss function",
                    f"transform {transform.name} (FORWARD)",
                    "apply(loss_fn) returns a function of (model, batch)",
                )
        return fn

    @property
    def settings(self) -> Settings:
        """The settings of all its transforms together."""
        settings = Settings()
        for transform in self.transforms:
            if isinstance(transform.apply, Configures):
                settings = transform.apply.configure(settings)
        return settings

    def replaced(self, name: str, record: object) -> Step:
        """A step whose transform of this name has another record."""
        return Step(
            self.loss_fn,
            tuple(attrs.evolve(t, apply=record) if t.name == name else t for t in self.transforms),
        )


StepLike = Step | LossFn
"""A step, or the loss function that becomes one."""


def as_step(step: StepLike, where: str) -> Step:
    """A Step of a Step or of a plain function.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(step, Step):
        return step
    if _marked(step, "made_of_step") or isinstance(step, nn.Module):
        raise ArgumentError(
            f"{type(step).__name__} is no loss function, which transforms and train steps are made of",
            where=where,
            fix="fa.train_step(fa.clip_norm(loss_fn, 1.0), model=..., optimizer=...), of a function "
            "loss_fn(model, batch)",
        )
    if _marked(step, "is_transform"):
        raise ArgumentError(
            "this is a transform without a step, not a loss function",
            where=where,
            fix="apply it first: fa.clip_norm(1.0)(loss_fn), or fa.chain(a, b)(loss_fn)",
        )
    if isinstance(step, type):
        raise ArgumentError(
            f"{step.__name__} is a class, and a step is a function loss_fn(model, batch)",
            where=where,
            fix=f"options that are classes or functions go by keyword, as in units={step.__name__}",
        )
    if not callable(step):
        raise ArgumentError(
            f"a step is a function loss_fn(model, batch), not {type(step).__name__}",
            where=where,
            fix="pass the loss function itself, before any call",
        )
    return Step(step)


def _marked(value: object, mark: str) -> bool:
    """Whether a value, or what a partial is of, has a mark: `is_transform`, or `made_of_step`."""
    while isinstance(value, functools.partial):
        value = value.func
    return getattr(value, mark, False) is True


def append(step: StepLike, transform: Transform) -> Step:
    """A step with one more transform.

    Raises:
        RepeatedTransformError: it is there already and not repeatable.
    """
    base = as_step(step, f"fa.{transform.name}")
    names = [t.name for t in base.transforms]
    if transform.name in names and transform.repeatable:  # each application has a state of its own
        number = next(n for n in itertools.count(1) if f"{transform.name}.{n}" not in names)
        transform = attrs.evolve(transform, name=f"{transform.name}.{number}")
    elif transform.name in names:
        raise RepeatedTransformError(
            f"{transform.name} was applied twice",
            where=f"step with {', '.join(t.name for t in base.transforms)}",
            fix=f"apply {transform.name} once, with the setting you want",
        )
    return Step(base.loss_fn, (*base.transforms, transform))
