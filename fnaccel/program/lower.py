"""From the description of a step to its loss and its hooks in order."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import nn

from fnaccel.data.micro_batches import MicroBatch, MicroBatches
from fnaccel.engine.engine import Engine
from fnaccel.engine.gradients import Gradients
from fnaccel.engine.passes import Loss
from fnaccel.errors import ArgumentError, require
from fnaccel.program.plan import order
from fnaccel.program.tail import Tail
from fnaccel.step.callables import title
from fnaccel.step.loss_info import Informed, takes_info
from fnaccel.step.settings import Settings
from fnaccel.step.spec import LossPart
from fnaccel.step.step import (
    Capability,
    GradientHook,
    Info,
    ModuleHook,
    Phase,
    Step,
    UpdateHook,
)
from fnaccel.tree import Tree


@attrs.frozen
class UserModule:
    """A user's MODULE function as a hook."""

    fn: Callable[[Any], None]

    def on_module(self, module: nn.Module, where: str) -> None:  # noqa: ARG002
        """Call it with the model."""
        self.fn(module)


@attrs.frozen
class UserGradients:
    """A user's GRADS function as a hook."""

    fn: Callable[[dict[str, Any], Any, Info], Any]
    name: str
    twice: bool = False  # it asks for a second gradient

    def on_gradients(self, grads: Gradients, state: Tree, info: Info) -> Any:
        """Call it with the gradients by name, and take its result."""
        if (skip := grads.skipped()) is not None:
            info = replace(info, skip=skip)
        given = grads.by_name(kept=self.twice)
        returned = self.fn(dict(given), state, info)
        if not isinstance(returned, tuple) or len(returned) != 2:  # pyright: ignore[reportUnknownArgumentType]
            raise ArgumentError(
                f"transform {self.name!r} returned {type(returned).__name__}",
                where=f"transform {self.name} (GRADS)",
                fix="return two values: the gradients by name, and the transform's next state (or None)",
            )
        grads.replace(returned[0], self.name)
        return grads.with_copies(returned[1], given, info.params)


@attrs.frozen
class UserUpdate:
    """A user's UPDATE function as a hook."""

    fn: Callable[[Mapping[str, Any], Any, Info], Any]

    def on_update(self, engine: Engine, state: Tree, info: Info) -> Any:
        """Call it with the parameters by name. It may change them in place."""
        with torch.no_grad():
            params = engine.layout.parameters
            return Gradients.with_copies(self.fn(params, state, info), params)


@runtime_checkable
class Settles(Protocol):
    """A layer of CALL transforms that acts late, and so once more after the last step."""

    def settle(self) -> None:
        """Act on the steps so far."""
        ...


@attrs.frozen(kw_only=True)
class Lowered:
    """A step, ready for an engine: its loss, its settings, and its hooks in order.

    `part` is this rank's part of the loss, or None.
    """

    loss: Loss
    settings: Settings
    modules: tuple[tuple[str, ModuleHook], ...]
    tail: Tail
    calls: tuple[tuple[str, Callable[..., Any]], ...]
    inits: tuple[tuple[str, Callable[[Any], Any]], ...]
    part: LossPart | None = None

    @property
    def no_user_hooks(self) -> bool:
        """Whether all hooks after the gradients are the library's own, and so can be captured."""
        stateful = {name for name, _ in self.inits}
        hooks = (*self.tail.gradients, *self.tail.updates)
        return not (self.tail.users or any(name in stateful for name, _ in hooks))

    def autocast_device(self, device: torch.device) -> str:
        """The kind of device on which a forward switches autocast, or ""."""
        return device.type if self.settings.precision.autocast else ""

    def parts_of(self, micro_batches: MicroBatches) -> MicroBatches:
        """This rank's parts of the micro-batches, which ranks split.

        Raises:
            MicroBatchError: a micro-batch can't be cut in parts.
        """
        assert self.part is not None
        datas, around = self.part.cut([part.data for part in micro_batches])
        pairs = zip(datas, micro_batches, strict=True)
        parts = MicroBatches(MicroBatch(data, whole.valid, whole.first) for data, whole in pairs)
        parts.batch, parts.around = micro_batches.batch, around
        return parts

    def around(self, call: Callable[..., Any]) -> tuple[Callable[..., Any], list[Settles]]:
        """`call(state, batch)` under the CALL transforms, the first written innermost.

        Returns:
            The function, and those of its layers that have something to do after the last step.
        """
        layers: list[Settles] = []
        for name, wrap in self.calls:
            call = wrap(call)
            require(
                callable(call),
                f"transform {name!r} returned {type(call).__name__}, not a function",
                f"transform {name} (CALL)",
                "apply(call) returns a function of (state, batch)",
            )
            layer: object = call
            if isinstance(layer, Settles):
                layers.append(layer)
        return call, layers


def lower(step: Step, delegated: Container[str] = (), part: LossPart | None = None) -> Lowered:
    """Sort the transforms of a step into hooks, and compile its loss if the step asks for it.

    Args:
        step: the step.
        delegated: names of transforms that a runtime carries out, so that they hook nothing here.
        part: this rank's part of the loss, if ranks split it.
    """
    ordered = order(step)
    settings = step.settings
    compiler, informed = settings.compiler, None
    if takes_info(step.loss_fn):
        traced = compiler is not None and compiler.scope != "block"
        informed = Informed(
            step.loss_fn, traced=traced, dynamic=compiler is not None and traced and bool(compiler.dims)
        )
    fn = step.forward(informed)
    if compiler is not None and compiler.scope == "loss":
        fn = compiler.of_loss(fn)
    weight_fn = settings.weight_fn
    if part is not None:
        fn = part.checked(fn)
        weight_fn = None if weight_fn is None else part.checked_weight(weight_fn)
    modules: list[tuple[str, ModuleHook]] = []
    gradients: list[tuple[str, GradientHook]] = []
    updates: list[tuple[str, UpdateHook]] = []
    calls: list[tuple[str, Callable[..., Any]]] = []
    for t in ordered:
        if t.phase is Phase.MODULE:
            modules.append((t.name, t.apply if _is_record(t.apply, ModuleHook) else UserModule(t.apply)))
        elif t.name in delegated:
            pass
        elif t.phase is Phase.GRADS:
            twice = Capability.SECOND_GRADIENT in t.needs
            own = _is_record(t.apply, GradientHook)
            gradients.append((t.name, t.apply if own else UserGradients(t.apply, t.name, twice)))
        elif t.phase is Phase.UPDATE:
            updates.append((t.name, t.apply if _is_record(t.apply, UpdateHook) else UserUpdate(t.apply)))
        elif t.phase is Phase.CALL and callable(t.apply):
            calls.append((t.name, t.apply))
    return Lowered(
        loss=Loss(
            fn=fn,
            where=title(step.loss_fn),
            weight_fn=weight_fn,
            sync_each=settings.sync_each,
            informed=informed,
            replays=compiler is not None and compiler.replays,
        ),
        settings=settings,
        modules=tuple(modules),
        tail=Tail(
            skips=settings.skips,
            gradients=tuple(gradients),
            updates=tuple(updates),
            users=tuple(
                name for name, hook in (*gradients, *updates) if isinstance(hook, UserGradients | UserUpdate)
            ),
        ),
        calls=tuple(calls),
        inits=tuple((t.name, t.init) for t in ordered if t.init is not None),
        part=part,
    )


def _is_record(apply: object, kind: type) -> bool:
    """Whether `apply=` is a record with a hook. A user's function is called, whatever methods it has."""
    return isinstance(apply, kind) and not callable(apply)
