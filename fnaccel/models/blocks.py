"""The blocks of a model: modules that are sharded, recomputed or compiled as one.

Used by `remat`, `compile` and `fsdp`, so that one word means the same in all three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import attrs
from torch import nn

from fnaccel.errors import ArgumentError, nearest


@attrs.frozen
class NamedUnits:
    """Units that were found on another copy of the model, such as the whole model before an axis cut it."""

    names: tuple[str, ...]

    def find(self, model: nn.Module, where: str) -> list[tuple[str, nn.Module]]:
        """The modules with these names."""
        named = dict(model.named_modules())
        for name in self.names:
            if name not in named:
                raise ArgumentError(
                    f"an axis of the strategy took the module {name!r} away, which is a unit",
                    where=where,
                    fix="keep the names of modules in the axis' apply(built, mesh), or choose other units",
                )
        return [(name, named[name]) for name in self.names]


Units = (
    str
    | int
    | list[str]
    | tuple[str, ...]
    | set[str]
    | frozenset[str]
    | Callable[[str, nn.Module], bool]
    | NamedUnits
    | None
)
"""`"block"`, `"no_split"`, class names, an int (fewest parameters), `fn(name, module) -> bool`, or None."""


@runtime_checkable
class HasUnits(Protocol):
    """A record that is about the units of a model: an axis or a MODULE transform."""

    units: Units


def find_units(model: nn.Module, units: Units, where: str) -> list[tuple[str, nn.Module]]:
    """The (name, module) pairs that `units` chooses, outer before inner.

    Args:
        model: the model, which is never one of its own units.
        units: `"block"` takes the repeated members of the outermost ModuleList or Sequential.
            `"no_split"` takes the classes that the model names in `_no_split_modules`, as models of
            transformers do. Other strings are class names. An int takes the largest modules of at least
            that many parameters which hold no smaller such module. A function chooses by name and module.
        where: the location in the error message.

    Raises:
        ArgumentError: a class name that no module has. Names the nearest.
    """
    if units is None:
        return []
    if isinstance(units, NamedUnits):
        return units.find(model, where)
    if units == "block":
        return blocks(model)
    if units == "no_split":
        return _not_split(model, where)
    if not (isinstance(units, int | str | tuple | list | set | frozenset) or callable(units)):
        raise ArgumentError(
            f"units={units!r} names no modules",
            where=where,
            fix='"block", "no_split", class names, a least number of parameters, a function, or None',
        )
    named = [(name, module) for name, module in model.named_modules() if name]
    if isinstance(units, int):
        return _by_size(named, units)
    if callable(units):
        return [(name, module) for name, module in named if units(name, module)]
    names = {units} if isinstance(units, str) else set(units)
    classes = {type(module).__name__ for _, module in named}
    for name in sorted(names - classes):
        raise ArgumentError(
            f"the model has no module of class {name!r}", where=where, fix=nearest(name, classes)
        )
    return [(name, module) for name, module in named if type(module).__name__ in names]


def _not_split(model: nn.Module, where: str) -> list[tuple[str, nn.Module]]:
    """The modules of the classes in `_no_split_modules`, of the model or of a model inside of it (peft)."""
    lists = [getattr(module, "_no_split_modules", None) for module in model.modules()]
    names = {name for listed in lists for name in listed or ()}
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in names]
    if not found:
        raise ArgumentError(
            f"{type(model).__name__} has no _no_split_modules that name its modules",
            where=where,
            fix='units="block", or class names: units=("BertLayer",)',
        )
    return [(name, module) for name, module in found if name]


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The members of each outermost ModuleList or Sequential in which a class repeats."""
    repeated_members: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        members = list(module.named_children())
        if isinstance(module, nn.ModuleList | nn.Sequential):
            count = Counter(
                type(child).__name__ for _, child in members if any(True for _ in child.parameters())
            )
            repeated = {kind for kind, times in count.items() if times > 1}
            if repeated:
                repeated_members.extend(
                    (f"{name}.{key}" if name else key, child)
                    for key, child in members
                    if type(child).__name__ in repeated
                )
                return
        for key, child in members:
            visit(f"{name}.{key}" if name else key, child)

    visit("", model)
    return repeated_members


def _by_size(named: list[tuple[str, nn.Module]], least: int) -> list[tuple[str, nn.Module]]:
    def size(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    containers = nn.ModuleList | nn.ModuleDict
    large = [(n, m) for n, m in named if size(m) >= least and not isinstance(m, containers)]
    return [
        (name, module)
        for name, module in large
        if not any(other.startswith(f"{name}.") for other, _ in large)
    ]
