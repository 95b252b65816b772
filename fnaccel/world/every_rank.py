"""`every_rank`: marks a public function that all ranks of the world must call.

Its calls are counted in the world's log (`calls.py`), so that ranks which make different calls get an error
that names them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from fnaccel.world.calls import CallLog
from fnaccel.world.world import World, find_current

P = ParamSpec("P")
R = TypeVar("R")


def every_rank(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorator: note each call of `fn` as one that all ranks make, and name the ranks if it fails.

    The world is that of `world=`, of a train step that comes first, or of this context. A call `over=`
    another process group is not counted: ranks outside of it do not make it, or a thread makes it.
    """
    return every_rank_of("train_step" if "." in fn.__qualname__ else "fa")(fn)


def every_rank_of(namespace: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`every_rank` for a function of a namespace, such as `"fa.collectives"`."""

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        name = f"{namespace}.{fn.__name__}"

        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():  # a compiled loss calls it between two graphs
                uncompiled: Any = torch.compiler.disable(run)
                return uncompiled(*args, **kwargs)
            calls = _log_of(args, kwargs)
            if calls is None:
                return fn(*args, **kwargs)
            over = kwargs.get("over")  # another group than that of the world has its own order of calls
            if over is not None and getattr(over, "group", over) is not dist.group.WORLD:
                return calls.explained(name, fn, *args, **kwargs)
            return calls.run(name, fn, *args, **kwargs)

        return run

    return decorate


def outside_inference(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorator: `fn` leaves `torch.inference_mode()`, whose tensors can't be trained."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return fn(*args, **kwargs)
        with torch.inference_mode(False):
            return fn(*args, **kwargs)

    return run


def outer_call(world: World | None, function: str) -> str:
    """The public function that this thread is in, such as `"in fa.save"`, or `""` if it is `function`."""
    world = find_current() if world is None else world
    name = "" if world is None or world.calls is None else world.calls.outer()
    return f"in {name}" if name and name != function else ""


def _log_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallLog | None:
    world: Any = kwargs.get("world")
    if world is None and args:
        world = getattr(getattr(args[0], "mesh", None), "world", None)
    if not isinstance(world, World):
        world = find_current()
    return None if world is None else world.calls
