"""Which interpreter makes an engine of which axes; the extension point for a user's own axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from fnaccel.engine.engine import Engine
from fnaccel.errors import CapabilityError
from fnaccel.models.building import Built
from fnaccel.models.parameter import Leaf
from fnaccel.step.precision_policy import Precision
from fnaccel.strategies.runtime import Delegation
from fnaccel.strategies.strategy import Strategy
from fnaccel.world.mesh import Mesh


@attrs.frozen(kw_only=True)
class Request:
    """What an interpreter is asked for."""

    strategy: Strategy
    mesh: Mesh
    model: Any
    seed: int
    precision: Precision
    prepare: Callable[[Built], None]
    """Freezes parameters, casts them and applies MODULE transforms, in that order."""
    capture: bool = False
    """Whether the step is captured as one graph, so that hooks have no place."""
    optimizers: Mapping[str | None, Any] | None = None
    """The descriptions by model, for runtimes that make the optimizer; None where nothing is trained."""
    skips: bool = False
    """Whether an update whose gradient is not finite is left out."""
    delegation: Delegation | None = None
    """What a runtime said that it carries out, and its configuration."""


Interpreter = Callable[[Request], tuple[Engine, Built]]

_interpreters: dict[frozenset[type], Interpreter] = {}


def interpreter(*axes: type) -> Callable[[Interpreter], Interpreter]:
    """Decorator: this function makes the engine of a product of exactly these axis records."""

    def register(fn: Interpreter) -> Interpreter:
        _interpreters[frozenset(axes)] = fn
        return fn

    return register


def interpreter_of(strategy: Strategy) -> Interpreter:
    """The interpreter of a strategy.

    Raises:
        CapabilityError: no interpreter takes these axes together.
    """
    kinds = frozenset(type(axis) for axis in strategy.axes)
    if kinds not in _interpreters:
        combined = {kind for some in _interpreters if len(some) > 1 for kind in some}
        single = [axis.maker for axis in strategy.axes if type(axis) not in combined]
        raise CapabilityError(
            f"nothing runs {strategy}: these axes have no interpreter together",
            where="fa.train_step",
            fix=f"use {' or '.join(single)} by itself: it copies and shards on its own"
            if single
            else "combine ddp and fsdp, or register one with fnaccel.strategies.axis.interpreter",
        )
    return _interpreters[kinds]


def same(local: Any) -> Any:
    """The layout of a parameter that every rank holds whole: the local tensor itself."""
    return local


def laid_out_as(param: Any) -> Callable[[torch.Tensor], Any]:
    """What lays a local tensor out over ranks as a DTensor parameter is."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow to import

    def like(local: torch.Tensor) -> Any:
        return DTensor.from_local(
            local,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )

    return like


def whole_leaves(built: Built) -> tuple[Leaf, ...]:
    """Leaves of an unsharded model: the shard is the parameter."""
    return tuple(
        Leaf(name, param, param.detach(), same)
        for name, param in built.named("parameters")
        if param.requires_grad
    )
