"""Models without values: parameters on the meta device, to look at their structure or to fill them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn

Place = torch.device | str | int | Callable[[Any], Any]


@contextlib.contextmanager
def making(parameters: Place, buffers: Place | None = None) -> Generator[None]:
    """Send what modules register to a device, while the body runs. Other threads build as before.

    A tensor that is registered under two names stays one tensor.

    Args:
        parameters: the device for parameters, or a function that returns the parameter in the place of one.
        buffers: the device for buffers. None leaves them where they are made.
    """
    entered = _Making(parameters, buffers)
    _of_thread.entered.append(entered)
    try:
        with _registering():
            yield
    finally:
        _of_thread.entered.remove(entered)


class _Making:
    """The devices of one `making`, and the tensors that it moved, by `id`.

    It holds the originals, so that no other tensor gets the `id` of one.
    """

    def __init__(self, parameters: Place, buffers: Place | None) -> None:
        self.parameters, self.buffers = parameters, buffers
        self.moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.entered: list[_Making] = []


_of_thread = _OfThread()
_lock = threading.Lock()
_replaced: list[tuple[Any, Any]] = []
"""The methods of torch that were replaced: one entry for each `making` of any thread."""


@contextlib.contextmanager
def _registering() -> Generator[None]:
    """Have modules register by `_of_thread`. The last thread that leaves puts torch's methods back."""
    module: Any = nn.Module
    with _lock:
        methods = _replaced[0] if _replaced else (module.register_parameter, module.register_buffer)
        if not _replaced:
            module.register_parameter, module.register_buffer = _registers(*methods)
        _replaced.append(methods)
    try:
        yield
    finally:
        with _lock:
            _replaced.pop()
            if not _replaced:
                module.register_parameter, module.register_buffer = methods


def _registers(register_parameter: Any, register_buffer: Any) -> tuple[Any, Any]:
    def parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        for entered in reversed(_of_thread.entered):
            # a lazy one has no shape yet
            if param is not None and not nn.parameter.is_lazy(param):
                param = _on(param, entered.parameters, entered.moved)
        register_parameter(module, name, param)

    def buffer(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        for entered in reversed(_of_thread.entered):
            if tensor is not None and entered.buffers is not None:
                tensor = _on(tensor, entered.buffers, entered.moved)
        register_buffer(module, name, tensor, persistent)

    return parameter, buffer


def _on(value: Any, place: Place, moved: dict[int, tuple[Any, Any]]) -> Any:
    """A parameter or buffer in its place. The same one if it was moved before."""
    if id(value) not in moved:
        placed = place(value) if callable(place) else value.to(place)
        if placed is not value and isinstance(value, nn.Parameter) and not callable(place):
            placed = type(value)(placed, requires_grad=value.requires_grad)
        moved[id(value)] = value, placed
        moved[id(placed)] = placed, placed
    return moved[id(value)][1]


def modules_without_values(model: object) -> dict[str | None, nn.Module | str]:
    """The modules of a model by key, made on the meta device, or the reason why one can't be.

    A factory runs once more than `init` runs it. Nothing is allocated, and torch's generator is left
    as it was. A built module is returned itself.

    Args:
        model: a factory, a module, or a dict of them, in which the key of another model stands for a copy.
    """
    parts: dict[Any, Any] = model if isinstance(model, dict) else {None: model}
    return {key: _one(parts[source] if isinstance(source, str) else source) for key, source in parts.items()}


def _one(source: Any) -> nn.Module | str:
    if isinstance(source, nn.Module):
        return source
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = source()
    except Exception as error:  # the user's own code: init will raise it again, or not
        return f"the factory can't run without values ({type(error).__name__})"
    return module if isinstance(module, nn.Module) else f"the factory returns {type(module).__name__}"
