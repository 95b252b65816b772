"""Events at the borders of modules in a forward and a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn

from fnaccel.models import _torch


@attrs.frozen
class Crossings:
    """Functions that run as a pass enters or leaves a module. `None` runs nothing.

    Attributes:
        before_forward: may return another dtype, to which floating-point inputs are cast.
        after_forward: the outputs exist.
        before_backward: the gradients of the outputs exist.
        after_backward: the gradients of the inputs exist.
    """

    before_forward: Callable[[], torch.dtype | None]
    after_forward: Callable[[], None]
    before_backward: Callable[[], None]
    after_backward: Callable[[], None]


class _Leave(torch.autograd.Function):
    """The identity. In backward it calls a function once the gradients of a module's inputs exist."""

    @staticmethod
    def forward(ctx: Any, leave: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.leave = leave
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        ctx.leave()
        return (None, *grads)


def watch(module: nn.Module, crossings: Crossings) -> None:
    """Call the functions of `crossings` whenever a pass enters or leaves a module."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = crossings.before_forward()
        values, structure = _torch.tree_flatten((args, kwargs))
        if dtype is not None:
            values = [_cast(value, dtype) for value in values]
        chosen = [i for i, value in enumerate(values) if _differentiable(value)]
        if chosen and torch.is_grad_enabled():
            for i, value in zip(
                chosen,
                _torch.applied(_Leave, crossings.after_backward, *[values[i] for i in chosen]),
                strict=True,
            ):
                values[i] = value
        return _torch.tree_unflatten(values, structure)

    def leave(_: nn.Module, args: object, output: Any) -> None:  # noqa: ARG001
        crossings.after_forward()
        pending = [True]

        def arrived(_: torch.Tensor) -> None:
            if pending:
                pending.clear()
                crossings.before_backward()

        for value in _torch.tree_flatten(output)[0]:
            if _differentiable(value):
                value.register_hook(arrived)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)


def _differentiable(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
