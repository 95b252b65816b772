"""Packages that import a public name when it is first used, and list all of them: `attach`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from fnaccel.errors import MissingBackendError


def attach(
    package: str, names: Mapping[str, str], *, namespaces: str = "", hints: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a package, to be called at the end of its imports.

    A type checker must not see this `__getattr__`, because every unknown name would be right for it. So the
    call is in the other branch of an `if TYPE_CHECKING` that imports the same names.

    Args:
        package: its name.
        names: the modules that are imported late, and the public names of each, separated by spaces.
        namespaces: the public modules of the package.
        hints: other public names that are modules. An error for an unknown name says which of these modules
            and namespaces has it.
    """
    module = sys.modules[package]
    homes = {name: home for home, listed in names.items() for name in listed.split()}
    eager = [name for name, value in vars(module).items() if _is_public(name, value)]
    public = sorted({*homes, *namespaces.split(), *eager})

    def get(name: str) -> Any:
        if name in homes:
            value = getattr(load(homes[name]), name)
            setattr(module, name, value)
            return value
        if name.startswith("_"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in namespaces.split() or importlib.util.find_spec(f"{package}.{name}") is not None:
            return load(f"{package}.{name}")  # sets the attribute
        rooms = [room for room in (namespaces + " " + hints).split() if _has(module, room, name)]
        hint = _did_you_mean(f"{package}.{name}", f"fa.{rooms[0]}.{name}" if rooms else "")
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")

    def list_names() -> list[str]:
        return sorted({*public, *(name for name in vars(module) if name.startswith("_"))})

    return get, list_names, public


_NAMES = {
    "fnaccel.grad": "torch.func.grad of fa.pure(train_step).loss, or fa.value_and_grad(train_step)",
    "fnaccel.jit": "fa.compile(step)",
    "fnaccel.vmap": "torch.vmap of fa.pure(train_step)",
    "fnaccel.tree_map": "fa.tree.map",
    "fnaccel.optim.scale": "the rate of an optimizer: fa.optim.chain(..., lr=0.1)",
    "Key.split": "key.fold_in(number), with a number for each use",
    "Optimizer.init": "fa.train_step(loss_fn, model=..., optimizer=...).init(seed=0)",
}
"""Names of JAX and optax, and what they are called here."""


def _did_you_mean(name: str, otherwise: str = "") -> str:
    text = _NAMES.get(name, otherwise)
    return f". Did you mean {text}?" if text else ""


def absent(owner: Any, name: str) -> Any:
    """The `__getattr__` of a class without an attribute of this name."""
    kind = type(owner).__name__
    raise AttributeError(f"{kind!r} object has no attribute {name!r}{_did_you_mean(f'{kind}.{name}')}")


def load(name: str) -> ModuleType:
    """Import a module of fnaccel that a copy of the package may lack.

    Raises:
        MissingBackendError: it is not there.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("fnaccel."):
            raise  # a package that the module needs
        raise MissingBackendError(
            f"this copy of fnaccel has no {error.name}",
            where=f"import {name}",
            fix="install fnaccel as a whole",
        ) from error


def _has(package: ModuleType, room: str, name: str) -> bool:
    try:
        return hasattr(getattr(package, room), name)
    except MissingBackendError:
        return False


def _is_public(name: str, value: object) -> bool:
    """Whether a package has imported a name from fnaccel for its users."""
    return not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("fnaccel.")
