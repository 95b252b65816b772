"""Calls of functions of a live model without gradients: sampling, evaluation, reading parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fnaccel.collectives.signature import meet
from fnaccel.engine.engine import Engine
from fnaccel.program.owned import Owned
from fnaccel.program.whole_parameters import explain, whole_parameters

LOOK = "train_step.look(state, fn)"


def look_at(owned: Owned, fn: Callable[..., Any], *args: Any, whole: bool) -> Any:
    """`fn(model, *args)`. If `whole`, parameters are gathered first.

    Raises:
        CapabilityError: `fn` read the part of a sharded parameter.
    """
    engine = owned.engine
    if not owned.sharded:
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


def _look(engine: Engine, fn: Callable[..., Any], *args: Any) -> Any:
    _meet_to_look(engine)
    return engine.look(fn, *args)


def _look_whole(engine: Engine, fn: Callable[..., Any], *args: Any) -> Any:
    _meet_to_look(engine)
    with torch.no_grad(), whole_parameters(engine.layout.model, engine.layout.parameters):
        return fn(engine.layout.model, *args)


def _meet_to_look(engine: Engine) -> None:
    world = engine.layout.mesh.world
    if world.calls is not None and world.calls.outer() == LOOK:  # fa.evaluate has met before its first look
        meet(LOOK, world)
