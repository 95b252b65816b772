"""Functions of a user in a plan: a name without an address, and a digest of the code.

Processes that did not fork from one another hold a function at different addresses. So a plan may hold no
`repr` of a function.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import attrs
from torch import nn

from fnaccel.errors import ArgumentError
from fnaccel.tree import Tree

_SIMPLE = int | float | complex | str | bytes | bool | type(None)
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")


def plan_text(value: Tree) -> str:
    """The text of an option in a plan: equal in all processes that were given an equal value.

    Functions appear by name, also inside of containers. Sets are sorted. Other values appear as their `repr`
    without addresses.

    Example:
        >>> from fnaccel.step.callables import plan_text
        >>> plan_text({"lr": len, "betas": (0.9, 0.95)})
        "{'lr': len, 'betas': (0.9, 0.95)}"
    """
    if type(value) is dict:
        return f"{{{', '.join(f'{plan_text(key)}: {plan_text(item)}' for key, item in value.items())}}}"
    if type(value) is list:
        return f"[{', '.join(map(plan_text, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(plan_text, value))}{',' if len(value) == 1 else ''})"
    if type(value) in (set, frozenset):  # the order of a set of texts differs between processes
        return f"{{{', '.join(sorted(map(plan_text, value)))}}}" if value else repr(value)
    return name_of(value) if callable(value) else _ADDRESS.sub("", repr(value))


def name_of(fn: Callable[..., Any]) -> str:
    """The name of a callable: the qualified name of a function, the text of a record, or the name of a class.

    Example:
        >>> from fnaccel.step.callables import name_of
        >>> name_of(functools.partial(torch.clamp, min=0))
        'partial(_VariableFunctionsClass.clamp, min=0)'
    """
    if isinstance(fn, functools.partial):
        named = [f"{key}={plan_text(value)}" for key, value in fn.keywords.items()]
        return f"partial({', '.join([name_of(fn.func), *map(plan_text, fn.args), *named])})"
    name = getattr(fn, "__qualname__", None)
    if isinstance(name, str):
        return name
    plain = type(fn).__repr__ is object.__repr__
    return type(fn).__qualname__ if plain else _ADDRESS.sub("", repr(fn))


def title(fn: Callable[..., Any]) -> str:
    """`module:qualname` of a callable. For a partial those of its function."""
    if isinstance(fn, functools.partial):
        return f"partial({title(fn.func)})"
    return f"{getattr(fn, '__module__', '?')}:{getattr(fn, '__qualname__', type(fn).__qualname__)}"


def functions_in(name: str, value: Tree) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of a user in a record: selections, units, schedules. Plans show them by name only."""
    if attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            yield from functions_in(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from functions_in(f"{name}.{index}", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from functions_in(f"{name}.{plan_text(key)}", item)
    elif callable(value) and not isinstance(value, type | BuiltinFunctionType):
        yield name, value


def digest(fn: Callable[..., Any]) -> str:
    """A digest of a callable: bytecode, constants, names, and simple values.

    Simple values are those in closures, in defaults, in the arguments of a partial, and in the public
    attributes of an object with `__call__`. Functions in these places count as well. The object of a bound
    method does not count: it may be a trainer, which has its rank as an attribute. Nor does a module.
    """
    hasher = hashlib.sha256()
    for text in _contents(fn, set()):
        hasher.update(text if isinstance(text, bytes) else text.encode())
    return hasher.hexdigest()[:16]


def _contents(value: Tree, seen: set[int]) -> Iterator[str | bytes]:
    """The parts of a value that count for its digest."""
    if isinstance(value, _SIMPLE):
        yield repr(value)
    elif type(value) is tuple:  # a list may be a log, and may hold itself
        for item in value:
            yield from _contents(item, seen)
    elif not callable(value) or id(value) in seen:
        return
    else:
        seen.add(id(value))
        yield title(value)
        yield from _inside(value, seen)


def _inside(fn: Any, seen: set[int]) -> Iterator[str | bytes]:
    if isinstance(fn, functools.partial):
        yield from _contents(fn.func, seen)
        yield from _contents(fn.args, seen)
        yield from _items(fn.keywords, seen)
    elif isinstance(fn, MethodType):
        yield from _contents(fn.__func__, seen)
    elif isinstance(fn, FunctionType):
        yield from _code(fn.__code__)
        yield from _contents(fn.__defaults__ or (), seen)
        yield from _items(fn.__kwdefaults__ or {}, seen)
        for cell in fn.__closure__ or ():
            try:
                yield from _contents(cell.cell_contents, seen)
            except ValueError:  # a cell that is not filled yet
                continue
    elif not isinstance(fn, type):
        yield from _contents(getattr(type(fn), "__call__"), seen)  # noqa: B004, B009 - the function, not its presence
        if not isinstance(fn, nn.Module):
            yield from _items(getattr(fn, "__dict__", {}), seen)


def _items(values: dict[str, Any], seen: set[int]) -> Iterator[str | bytes]:
    for name, value in values.items():
        if name.startswith("_"):  # a cache or a counter
            continue
        yield name
        yield from _contents(value, seen)


def _code(code: CodeType) -> Iterator[str | bytes]:
    yield code.co_code
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        elif isinstance(constant, _SIMPLE | tuple):
            yield repr(constant)


def function_of(reference: str, where: str) -> Callable[..., Any]:
    """The function of `"module:function"`, as an option of a strategy names one.

    Args:
        reference: a module on the path, and the name of a function at its top.
        where: the option, for the error.

    Raises:
        ArgumentError: there is none.

    Example:
        >>> from fnaccel.extend import function_of
        >>> function_of("math:sqrt", "my_axis(by=)")(4.0)
        2.0
    """
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(
            f"{reference!r} can't be imported: {error}", where=where, fix='"module:function" of yours'
        ) from error
