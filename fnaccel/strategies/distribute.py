"""`distribute(model, strategy)`: a pure record of the model and its layout over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import nn

from fnaccel.errors import ArgumentError, OwnershipError, require
from fnaccel.strategies.strategy import Strategy, strategy

Model = nn.Module | Callable[[], nn.Module]


@attrs.frozen
class Distributed:
    """A model (or a dict of models) and the strategy it is trained under. Nothing is built yet.

    Example:
        >>> print(fa.distribute(GPT, "zero2").strategy)
        fsdp(reshard_after_forward=False)
    """

    model: Any
    strategy: Strategy | None


def distribute(
    model: Model | Mapping[str, Model | str], strategy_: Strategy | str | None = None, /
) -> Distributed:
    """Describe how a model is laid out over the ranks. Nothing is built or moved.

    Args:
        model: a factory (a class or a function without arguments, preferred), a module, or a dict
            of either, which gives `model["name"]` in the loss. There the name of another model makes a copy
            of it: `{"student": GPT, "teacher": "student"}`.
        strategy_: a strategy such as `fa.fsdp()`, or its name or text. None leaves it open:
            `fa.train_step` takes what the launcher says (`--strategy fsdp`), or else `local` on one rank and
            `ddp` on several.

    Raises:
        ArgumentError: not a model, or a name that none can have.
        OwnershipError: a model that is distributed already.
        UnknownNameError: no such strategy.

    Example:
        >>> model = fa.distribute(GPT, fa.fsdp())
        >>> model = fa.distribute({"student": GPT, "teacher": lambda: GPT()}, "ddp")
    """
    chosen = None if strategy_ is None else strategy(strategy_)
    for value in model.values() if isinstance(model, Mapping) else (model,):
        if isinstance(value, str) and isinstance(model, Mapping):
            require(
                not isinstance(model.get(value, value), str),
                f"a model is to be a copy of {value!r}, which is a copy itself, or no other model",
                "fa.distribute",
                'name a model of the dict that is no copy: {"student": GPT, "teacher": "student"}',
            )
            continue
        if isinstance(value, Distributed):
            raise OwnershipError(
                "this model is distributed already",
                where=f"fa.distribute(..., {chosen})",
                fix="call distribute once, on the module or factory itself",
            )
        if not isinstance(value, nn.Module) and not callable(value):
            raise ArgumentError(
                f"a model is a module or a factory, not {type(value).__name__}",
                where="fa.distribute",
                fix="fa.distribute(lambda: GPT(config), fa.fsdp())",
            )
    if isinstance(model, Mapping):
        for key in model:
            require(
                isinstance(key, str) and "/" not in key,
                f"a model can't be called {key!r}",
                "fa.distribute",
                'give text without "/", which joins the names of models and parameters',
            )
    return Distributed(dict(model) if isinstance(model, Mapping) else model, chosen)
