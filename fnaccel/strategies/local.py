"""`local()`: one process, no axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from fnaccel.engine.capture import Capture
from fnaccel.engine.engine import Engine
from fnaccel.models.building import Built, check_alike, construct
from fnaccel.step.step import EVERYTHING
from fnaccel.strategies.axis import Request, interpreter, whole_leaves
from fnaccel.strategies.strategy import Strategy, maker


@maker
def local() -> Strategy:
    """One process trains the whole model; the empty product of axes.

    Example: `fa.distribute(GPT, fa.local())`.
    """
    return Strategy(())


def place(built: Built, request: Request) -> None:
    """Prepare the modules and move them to this rank's device."""
    request.prepare(built)
    check_alike(built, request.mesh.world)
    for module in built.modules.values():
        module.to(request.mesh.world.device)


@interpreter()
def build_local(request: Request) -> tuple[Engine, Built]:
    """The engine of one process."""
    built = construct(request.model, request.seed)
    place(built, request)
    return whole_engine(
        "local", built, request, capture=capture_whole(built) if request.capture else None
    ), built


def capture_whole(built: Built, **fields: Any) -> Capture:
    """How to capture a step of a model that every rank holds whole.

    Args:
        built: the modules.
        fields: how gradients are averaged, where there are several ranks.
    """
    model = built.model
    leaves = tuple(attrs.evolve(leaf, shard=leaf.param) for leaf in whole_leaves(built))
    params = [leaf.param for leaf in leaves]

    def run(fn: Any, *args: Any) -> Any:
        return fn(model, *args)

    return Capture(
        leaves=leaves,
        open=lambda: (params, run),
        blank=lambda: [torch.zeros_like(param) for param in params],
        **fields,
    )


def whole_engine(
    name: str, built: Built, request: Request, *, run: Callable[..., Any] | None = None, **fields: Any
) -> Engine:
    """An engine whose every rank holds the whole model; by itself it averages nothing.

    Args:
        name: of the strategy.
        built: the modules.
        request: what was asked for.
        run: how to call a function of the model; directly by default.
        fields: further fields of the engine.
    """
    model = built.model

    def direct(fn: Any, *args: Any) -> Any:
        return fn(model, *args)

    return Engine(
        name=name,
        mesh=request.mesh,
        capabilities=EVERYTHING & request.strategy.capabilities(),
        model=model,
        leaves=whole_leaves(built),
        parameters=dict(built.named("parameters")),
        buffers=dict(built.named("buffers")),
        modules=tuple(built.modules.values()),
        lend=direct,
        run=run or direct,
        **fields,
    )
