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
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from fnaccel import _torch
from fnaccel.models._torch import forward_hooks_of
from fnaccel.world.random_streams import generators_of

_DEPTH = 3  # how deep variables are followed: a list in an object in a closure
_LARGEST = 1 << 24  # elements of a tensor or an array that is copied
_MOST = 10_000  # values that are looked at
_COPIED = ("count", "list_iterator", "tuple_iterator", "range_iterator", "str_ascii_iterator")
_REGISTERED = ("_buffers", "_modules")
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
        before.home |= {_package(function)} - {"torch"}  # a lent module may be FSDP2's, or an nn.Sequential
        before.each([function], _DEPTH + 1)
    for root in roots:
        before.modules(root, _DEPTH)
    try:
        yield
    finally:
        for undo in reversed(before.undo):
            # a value that refuses was not changed either
            with contextlib.suppress(Exception), torch.no_grad():
                undo()


@contextlib.contextmanager
def passes_put_back(roots: Iterable[nn.Module], streams: Sequence[torch.Generator]) -> Generator[None]:
    """After passes beside those of an update, buffers and random streams are as before them."""
    slots = [_torch.buffers_of(module) for root in roots for module in root.modules()]
    held = [(slot, name, x, x.clone()) for slot in slots for name, x in slot.items() if x is not None]
    states = [(stream, stream.get_state()) for stream in streams]
    try:
        yield
    finally:
        for stream, state in states:
            stream.set_state(state)
        with torch.no_grad():
            for slot, name, buffer, before in held:
                slot[name] = buffer.copy_(before)


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _copied_iterator(value: Any) -> Any:
    """A copy of an iterator of Python's own at its place, such as a count. Anything else as it is."""
    if isinstance(value, Iterator) and type(value).__name__ in _COPIED:  # others share what they iterate over
        with contextlib.suppress(TypeError), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.14 on itertools has no copies
            return copy.copy(value)
    return value


def _names_in(code: CodeType) -> Iterator[str]:
    """The names that code and the functions inside of it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _refill(container: Any, held: Any) -> None:
    """Give a container its items again, by the methods of its base class: a subclass may have others."""
    base: Any = next(kind for kind in (OrderedDict, dict, list, deque, set) if isinstance(container, kind))
    base.clear(container)
    (base.extend if hasattr(base, "extend") else base.update)(container, held)


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
            self.each((value.__func__, value.__self__), depth)
        elif isinstance(value, functools.partial):
            self.each((value.func, *value.args, *value.keywords.values()), depth)
        elif isinstance(value, nn.Module):
            self.modules(value, depth)
            self.each(value.buffers(), depth)
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, torch.Generator):
            self._later(value.set_state, value.get_state())
        elif isinstance(value, random.Random):
            self._later(value.setstate, value.getstate())
        elif _package(type(value)) == "numpy":
            self._array(value)
        elif isinstance(value, tuple):
            self.each(value, depth)
        elif isinstance(value, list | deque | dict | set):
            # a subclass of another package may refuse changes, as the trees of states do
            if _package(type(value)) in (*self.home, "builtins", "collections"):
                self._container(value, depth)
        elif isinstance(value, SimpleNamespace) or (
            _package(type(value)) in self.home and hasattr(value, "__dict__")
        ):
            self.attributes(value, depth)

    def modules(self, root: nn.Module, depth: int) -> None:
        """Note the attributes of modules, and the variables of the forwards of the user's classes."""
        for module in root.modules():
            self.attributes(module, depth)
            for name in _REGISTERED:  # a first forward may register more, of the size of its rows
                self._later(functools.partial(_refill, vars(module)[name]), dict(vars(module)[name]))
            self.each(forward_hooks_of(module), depth + 1)
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
        self.each(kept.values(), depth)

    def each(self, values: Iterable[Any], depth: int) -> None:
        """Note values that others hold. A value that raises when it is looked at is left alone."""
        for value in tuple(values):
            with contextlib.suppress(Exception):
                if value is not None and not isinstance(value, str | bytes | int | float | type):
                    self.value(value, depth - 1)

    def _container(self, value: Any, depth: int) -> None:
        held = dict(value) if isinstance(value, dict) else [*value]
        self._later(functools.partial(_refill, value), held)
        self.each(value.values() if isinstance(value, dict) else value, depth)

    def _tensor(self, value: torch.Tensor) -> None:
        freed = value.layout is torch.strided and value.numel() and not value.untyped_storage().nbytes()
        if value.is_leaf and not value.requires_grad and not freed and value.numel() <= _LARGEST:
            version, held = _torch.version_of(value), value.clone()
            # an unchanged tensor stays as it is: a new version would break a graph that is still to be run
            self.undo.append(lambda: value.copy_(held) if _torch.version_of(value) != version else None)

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
                self.each([value], depth)
        self.each([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()], depth)
        names = [name for name in _names_in(function.__code__) if name in function.__globals__]
        held = {name: function.__globals__[name] for name in names}
        self._later(function.__globals__.update, held)
        function.__globals__.update({name: _copied_iterator(value) for name, value in held.items()})
        self.each(held.values(), depth)
