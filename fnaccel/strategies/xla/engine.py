"""The engine behind `xla`: modules on the virtual device, layouts as annotations, one graph a step.

XLA records operations and runs them when told to. That is once after each update (and once before the
first, so that the first step's graph is that of the others), never between micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fnaccel import _torch
from fnaccel.engine import engine as engines
from fnaccel.extend import Build, Built, Engine, Forward, Hooks, Leaf, construct, finisher
from fnaccel.strategies.xla.layout import Layout
from fnaccel.strategies.xla.record import Xla


@finisher(Xla)
def build_xla(build: Build, options: Xla) -> tuple[Engine, Built]:
    """The engine of all XLA devices of this machine."""
    layout = Layout.of(options)
    built = construct(build.spec.model, build.seed)
    build.prepare(built)
    _move(built, build.spec.mesh.world.device)
    for _, value in [*built.named("parameters"), *built.named("buffers")]:
        layout.keep(value)
    model = built.model

    def direct(fn: Callable[..., Any], *args: Any) -> Any:
        return fn(model, *args)

    def run(fn: Callable[..., Any], *args: Any) -> Any:
        # the batch comes first. Models of another train step are laid out by their own engine
        return direct(fn, layout.spread(args[0]), *args[1:]) if args else direct(fn)

    engine = Engine(
        name="xla",
        layout=engines.Layout(
            mesh=build.spec.mesh,
            model=model,
            leaves=tuple(
                Leaf(name, param, layout.alias(param.detach()), param, keep=layout.keep)
                for name, param in built.named("parameters")
                if param.requires_grad
            ),
            parameters=dict(built.named("parameters")),
            buffers=dict(built.named("buffers")),
        ),
        forward=Forward(run=run, lend=direct),
        hooks=Hooks(settle=layout.carry_out, end=layout.carry_out),
    )
    return engine, built


def _move(built: Built, device: torch.device) -> None:
    """Move parameters and buffers. `module.to` would make two of a tied weight."""

    def moved(param: torch.Tensor) -> Any:
        return torch.nn.Parameter(param.detach().to(device), requires_grad=param.requires_grad)

    _torch.replace_parameters(built.host, moved)
    moved_buffers: dict[int, torch.Tensor] = {}
    originals: list[torch.Tensor] = []  # or a later tensor could have the id of one that is gone
    for module in built.host.modules():
        slots = _torch.buffers_of(module)
        for name, value in slots.items():
            if value is not None:
                originals.append(value)
                slots[name] = moved_buffers.setdefault(id(value), value.to(device))
