"""Models without values: parameters on the meta device, to look at their structure or to fill them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def making(
    parameters: torch.device | str | int, buffers: torch.device | str | int | None = None
) -> Generator[None]:
    """Send what modules register to a device, while the body runs.

    A tensor that is registered under two names stays one tensor.

    Args:
        parameters: the device for parameters.
        buffers: the device for buffers. None leaves them where they are made.
    """
    from unittest import mock  # noqa: PLC0415 - slow to import, and rarely needed

    register_parameter, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the first keeps its id from being used again

    def parameter(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        # a lazy one has no shape yet
        if value is not None and not nn.parameter.is_lazy(value):
            value = _on(value, parameters, moved)
        register_parameter(module, name, value)

    def buffer(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        if tensor is not None and buffers is not None:
            tensor = _on(tensor, buffers, moved)
        register_buffer(module, name, tensor, persistent)

    with (
        mock.patch.object(nn.Module, "register_parameter", parameter),
        mock.patch.object(nn.Module, "register_buffer", buffer),
    ):
        yield


def _on(value: Any, device: torch.device | str | int, moved: dict[int, tuple[Any, Any]]) -> Any:
    """A parameter or buffer on a device. The same one if it was moved before."""
    if id(value) not in moved:
        placed = value.to(device)
        if placed is not value and isinstance(value, nn.Parameter):
            placed = type(value)(placed, requires_grad=value.requires_grad)
        moved[id(value)] = value, placed
        moved[id(placed)] = placed, placed
    return moved[id(value)][1]


def modules_without_values(model: object) -> dict[str | None, nn.Module | str]:
    """The modules of a model by key, made on the meta device, or the reason why one can't be.

    A factory runs once more than `init` runs it. Nothing is allocated, and torch's generator is left
    as it was. A built module is returned itself.

    Args:
        model: a factory, a module, or a dict of them.
    """
    parts = model if isinstance(model, dict) else {None: model}
    return {key: _one(source) for key, source in parts.items()}


def _one(source: Any) -> nn.Module | str:
    if isinstance(source, nn.Module):
        return source
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = source()
    except Exception as error:  # the user's own code: init will raise it again, or not
        return f"the factory can't run without values ({type(error).__name__})"
    return module if isinstance(module, nn.Module) else f"the factory returns {type(module).__name__}"
