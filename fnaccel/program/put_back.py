"""`put_back`: a call of the user's functions that leaves no trace, as far as Python shows what they change.

The check of totals calls a loss twice before the first step. A queue of negatives, a list of predictions in a
closure, and a counter of a module have to be as the user left them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from fnaccel.models._torch import forward_hooks_of
from fnaccel.world.random_streams import generators_of

_DEPTH = 3  # how deep variables are followed: a list in an object in a closure
_LARGEST = 1 << 24  # elements of a tensor or an array that is copied
_MOST = 10_000  # values that are looked at
_TORCH_S_OWN = frozenset(vars(nn.Module()))


@contextlib.contextmanager
def put_back(
    functions: Iterable[Callable[..., Any]], roots: Iterable[nn.Module], device: torch.device
) -> Generator[None]:
    """Afterwards variables of functions, attributes of modules and random generators are as before.

    Parameters, and buffers of `roots`, are left to the caller. Files, generators, and objects of other
    packages are not seen. Variables that are other iterators hold copies of these meanwhile.

    Args:
        functions: called in the body, and lent modules. Closures, and globals that code names, are followed.
        roots: modules whose attributes may change.
        device: of the generators.
    """
    before = _Before(device)
    for function in functions:
        before.home |= {_package(function)}
        before.value(function, _DEPTH)
    for root in roots:
        before.modules(root, _DEPTH)
    try:
        yield
    finally:
        for undo in reversed(before.undo):
            with contextlib.suppress(Exception):  # a value that refuses can't have been changed either
                undo()


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _copied_iterator(value: Any) -> Any:
    """A copy of an iterator of Python's own at its place, such as a count. Anything else as it is."""
    if isinstance(value, Iterator) and _package(type(value)) in ("builtins", "itertools"):
        with contextlib.suppress(TypeError), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.14 on itertools has no copies
            return copy.copy(value)
    return value


class _Before:
    """Notes how to put values back."""

    def __init__(self, device: torch.device) -> None:
        self.undo: list[Callable[[], Any]] = []
        # the packages of the user's functions: objects of their classes are followed
        self.home = {"__main__"}
        self._seen: set[int] = set()
        self._later(random.setstate, random.getstate())
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            self._later(numpy.random.set_state, numpy.random.get_state())
        for generator in generators_of(device):
            self._later(generator.set_state, generator.get_state())

    def _later(self, put: Callable[[Any], Any], value: Any) -> None:
        self.undo.append(functools.partial(put, value))

    def value(self, value: Any, depth: int) -> None:
        """Note a value that may change in place, and the values that it holds."""
        if depth < 0 or id(value) in self._seen or len(self._seen) > _MOST:
            return
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            self._variables(value, depth)
        elif isinstance(value, MethodType):
            self._each((value.__func__, value.__self__), depth)
        elif isinstance(value, functools.partial):
            self._each((value.func, *value.args, *value.keywords.values()), depth)
        elif isinstance(value, nn.Module):
            self.modules(value, depth)
            self._each(value.buffers(), depth)
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, torch.Generator):
            self._later(value.set_state, value.get_state())
        elif isinstance(value, random.Random):
            self._later(value.setstate, value.getstate())
        elif _package(type(value)) == "numpy":
            self._array(value)
        elif isinstance(value, list | deque | dict | set):
            # a subclass of another package may refuse changes, as the trees of states do
            if _package(type(value)) in (*self.home, "builtins", "collections"):
                self._container(value, depth)
        elif _package(type(value)) in self.home and hasattr(value, "__dict__"):
            self.attributes(value, depth)

    def modules(self, root: nn.Module, depth: int) -> None:
        """Note the attributes of modules, and the variables of the forwards of the user's classes."""
        for module in root.modules():
            self.attributes(module, depth)
            self._each(forward_hooks_of(module), depth + 1)
            if _package(type(module)) in self.home:
                self.value(type(module).forward, depth)

    def attributes(self, owner: Any, depth: int) -> None:
        """Note the attributes of an object: of a module those that torch has no slots for."""
        self._seen.add(id(owner))
        slots: dict[str, Any] = vars(owner)
        skipped = _TORCH_S_OWN if isinstance(owner, nn.Module) else frozenset[str]()
        kept = {name: value for name, value in slots.items() if name not in skipped}

        def restore(kept: Mapping[str, Any]) -> None:
            for name in slots.keys() - skipped - kept.keys():
                del slots[name]
            slots.update(kept)

        self._later(restore, kept)
        self._each(kept.values(), depth)

    def _each(self, values: Iterable[Any], depth: int) -> None:
        for value in tuple(values):
            if value is not None and not isinstance(value, str | bytes | int | float | type):
                self.value(value, depth - 1)

    def _container(self, value: Any, depth: int) -> None:
        def restore(held: Any) -> None:
            value.clear()
            value.extend(held) if hasattr(value, "extend") else value.update(held)

        self._later(restore, dict(value) if isinstance(value, dict) else [*value])
        self._each(value.values() if isinstance(value, dict) else value, depth)

    def _tensor(self, value: torch.Tensor) -> None:
        if value.is_leaf and not value.requires_grad and value.numel() <= _LARGEST:
            self._later(value.copy_, value.clone())

    def _array(self, value: Any) -> None:
        if hasattr(value, "bit_generator"):
            bits = value.bit_generator
            self._later(functools.partial(setattr, bits, "state"), bits.state)
        if getattr(value, "ndim", 0) and value.size <= _LARGEST and value.flags.writeable:
            self._later(functools.partial(value.__setitem__, ...), value.copy())

    def _variables(self, function: FunctionType, depth: int) -> None:
        """Note the cells of a function's closure, and the globals that its code names."""
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is not filled yet
                value = cell.cell_contents
                self._later(functools.partial(setattr, cell, "cell_contents"), value)
                cell.cell_contents = _copied_iterator(value)
                self._each([value], depth)
        names = (name for name in function.__code__.co_names if name in function.__globals__)
        held = {name: function.__globals__[name] for name in names}
        self._later(function.__globals__.update, held)
        function.__globals__.update({name: _copied_iterator(value) for name, value in held.items()})
        self._each(held.values(), depth)
