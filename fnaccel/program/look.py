"""Calls of functions of a live model without gradients: sampling, evaluation, reading parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fnaccel.collectives.signature import meet
from fnaccel.engine.engine import Engine
from fnaccel.models.operation_counts import operation_counts
from fnaccel.program.instance import Instance
from fnaccel.program.whole_parameters import explain, whole_parameters
from fnaccel.tree import Tree

LOOK = "train_step.look(state, fn)"


def look_at(instance: Instance, fn: Callable[..., Any], *args: Any, whole: bool) -> Any:
    """`fn(model, *args)`. If `whole`, parameters are gathered first.

    Raises:
        CapabilityError: `fn` read the part of a sharded parameter.
    """
    engine = instance.engine
    if not instance.sharded:
        return engine.look(fn, *args)
    look = functools.partial(_look_whole if whole else _look, engine)
    calls = engine.layout.mesh.world.calls
    look = look if calls is None else calls.wrap(LOOK, look)
    try:
        return look(fn, *args)
    except Exception as error:
        explained = explain(error)
        if explained is not None:
            raise explained from error
        raise


def flops_of(forward: Callable[[Tree], Any], row: Tree) -> float:
    """Floating-point operations of a forward, by torch's counter. Compiled models run eagerly."""
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415 - it imports triton if there is one

    # the counter knows no attention kernel of the CPU, and knows the products that attention is made of
    operation_counts()  # so that it knows attention on CPUs
    counter = FlopCounterMode(display=False)
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH), counter:
        forward(row)
    return float(counter.get_total_flops())


def _look(engine: Engine, fn: Callable[..., Any], *args: Any) -> Any:
    _meet_to_look(engine)
    return engine.look(fn, *args)


def _look_whole(engine: Engine, fn: Callable[..., Any], *args: Any) -> Any:
    _meet_to_look(engine)
    with torch.no_grad(), whole_parameters(engine.layout):
        return fn(engine.layout.model, *args)


def _meet_to_look(engine: Engine) -> None:
    world = engine.layout.mesh.world
    if world.calls is not None and world.calls.outer() == LOOK:  # fa.evaluate has met before its first look
        meet(LOOK, world)
