"""`local()`: one process, no axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fnaccel.engine import Engine
from fnaccel.step import EVERYTHING
from fnaccel.strategies.construct import Built, construct
from fnaccel.strategies.engines import Request, interpreter, whole_leaves
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
    for module in built.modules.values():
        module.to(request.mesh.world.device)


@interpreter()
def build_local(request: Request) -> tuple[Engine, Built]:
    """The engine of one process."""
    built = construct(request.model, request.seed)
    place(built, request)
    return whole_engine("local", built, request), built


def whole_engine(
    name: str, built: Built, request: Request, *, run: Callable[..., Any] | None = None, **fields: Any
) -> Engine:
    """An engine whose every rank holds the whole model; by itself it averages nothing."""
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
