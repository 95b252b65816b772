"""`local()`: one process, no axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from fnaccel.engine.engine import Capture, Engine, Forward, Hooks, Layout, Runtime
from fnaccel.errors import CapabilityError
from fnaccel.models.building import Built, construct
from fnaccel.models.parameter import memory_of
from fnaccel.strategies.axis import Build, finisher
from fnaccel.strategies.layout import leaves_of, parameters_shown
from fnaccel.strategies.partial_gradients import with_sums, with_sums_in_graph
from fnaccel.strategies.same_model import check_alike
from fnaccel.strategies.strategy import Strategy, maker


@maker
def local() -> Strategy:
    """One process trains the whole model: the empty product of axes.

    Example:
        >>> fa.distribute(GPT, fa.local())
    """
    return Strategy(())


def place(built: Built, build: Build) -> None:
    """Prepare the modules and move them to this rank's device."""
    build.prepare(built)
    check_alike(built, build.spec.mesh.world)
    for module in built.modules.values():
        module.to(build.spec.mesh.world.device)


@finisher(None)
def build_local(build: Build, options: None) -> tuple[Engine, Built]:  # noqa: ARG001
    """The engine of a model that every rank holds whole, and whose gradients nobody averages."""
    built = construct(build.spec.model, build.seed)
    place(built, build)
    return whole_engine(
        "local", built, build, capture=capture_whole(built, build) if build.settings.captured else None
    ), built


def capture_whole(built: Built, build: Build, **fields: Any) -> Capture:
    """How to capture a step of a model whose modules have all that a rank computes with.

    Args:
        built: the modules.
        build: the train step.
        fields: how gradients are averaged, if there are several ranks.

    Raises:
        CapabilityError: a parameter that the update of a graph can't take.
    """
    for name, param in built.named("parameters"):
        if param.requires_grad and (param.is_complex() or memory_of(param) != "dense"):
            raise CapabilityError(
                f"{name} {'is complex' if param.is_complex() else 'has gaps in memory'}, and the step is "
                "captured as one graph",
                where="fa.compile",
                fix="fa.compile(step, scope='loss')"
                + ("" if param.is_complex() else ", or nn.Parameter(value.contiguous())"),
            )
    model = built.model
    leaves = tuple(attrs.evolve(leaf, shard=leaf.param) for leaf in leaves_of(built, build.spec.mesh))
    params = [leaf.param for leaf in leaves]

    def run(fn: Callable[..., Any], *args: Any) -> Any:
        return fn(model, *args)

    capture = Capture(
        leaves=leaves,
        open=lambda: (params, run),
        blank=lambda: [torch.zeros_like(param) for param in params],
        **fields,
    )
    return with_sums_in_graph(capture, built, build.spec.mesh)


def whole_engine(
    name: str,
    built: Built,
    build: Build,
    *,
    run: Callable[..., Any] | None = None,
    hooks: Hooks | None = None,
    runtime: Runtime | None = None,
    shares_buffers: bool = True,
    next_whole: Callable[[int], int] | None = None,
    **forward: Any,
) -> Engine:
    """An engine whose modules have all that a rank computes with. By itself it averages nothing.

    Args:
        name: of the strategy.
        built: the modules.
        build: the train step.
        run: how to call a function of the model: directly by default.
        hooks, runtime: as `Engine` has them.
        shares_buffers, next_whole: as `Layout` has them.
        forward: further fields of `Forward`.
    """
    model, mesh = built.model, build.spec.mesh

    def direct(fn: Callable[..., Any], *args: Any) -> Any:
        return fn(model, *args)

    return Engine(
        name=name,
        layout=Layout(
            mesh=mesh,
            model=model,
            leaves=leaves_of(built, mesh),
            parameters=parameters_shown(built, mesh),
            buffers=dict(built.named("buffers")),
            shares_buffers=shares_buffers,
            next_whole=next_whole,
        ),
        forward=Forward(run=run or direct, lend=direct, **forward),
        hooks=with_sums(hooks or Hooks(), built, mesh),
        runtime=runtime or Runtime(),
    )
