"""Methods that raise while a module is dispatched: they would copy or move values that are elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from fnaccel.errors import CapabilityError

_MOVES = (
    "to",
    "cpu",
    "cuda",
    "xpu",
    "half",
    "float",
    "double",
    "bfloat16",
    "type",
    "to_empty",
    "share_memory",
)
_COPIES = {"__deepcopy__": "copy.deepcopy", "__reduce_ex__": "pickle"}


def guard(model: nn.Module, copied: Callable[[dict[int, Any]], nn.Module] | None = None) -> None:
    """Have methods that move or copy all values raise CapabilityError.

    Args:
        model: the module.
        copied: makes a deep copy in the place of an error.
    """
    for name in _MOVES:
        model.__dict__[name] = _raising(f"model.{name}()", "moves or casts all weights")
    for name, text in _COPIES.items():
        model.__dict__[name] = _raising(text, "copies all weights and the hooks")
    if copied is not None:
        model.__dict__["__deepcopy__"] = copied


def unguard(model: nn.Module) -> None:
    """Give the module its methods again."""
    for name in (*_MOVES, *_COPIES):
        model.__dict__.pop(name, None)


def _raising(call: str, effect: str) -> Callable[..., NoReturn]:
    def raises(*_: object, **__: object) -> NoReturn:
        raise CapabilityError(
            f"{call} {effect}, and this model is dispatched",
            where="a dispatched model",
            fix="fa.big.dispatch_of(model).remove() first. To cast: fa.big.load(model, path, dtype=...)",
        )

    return raises
