"""`with_gradient`: a total whose gradient is given, for estimators that compute gradients by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fnaccel.errors import ArgumentError, CapabilityError, TreeMismatchError, UnknownNameError, nearest

_WHERE = "fa.with_gradient(total, params, grads)"


class _Given(torch.autograd.Function):
    """The total as it is. Its backward hands the given gradients on, times the incoming one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(total: torch.Tensor, count: int, *tensors: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # pyright: ignore[reportIncompatibleMethodOverride]
        return total.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.count = inputs[1]
        ctx.save_for_backward(*inputs[2 + inputs[1] :])

    @staticmethod
    def backward(ctx: Any, out: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *((out * grad).to(grad.dtype) for grad in ctx.saved_tensors), *[None] * ctx.count


class _GivenOnce(_Given):
    """The same outside of compiled code. If the gradient is differentiated again, it raises."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.count = inputs[1]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, out: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        params, given = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        grads = [(out * grad).to(grad.dtype) for grad in given]
        if torch.is_grad_enabled():  # a graph of the gradient is made
            ended: Any = _Ended.apply
            grads = [ended(grad, param) for grad, param in zip(grads, params, strict=True)]
        return None, None, *grads, *[None] * ctx.count


class _Ended(torch.autograd.Function):
    """A gradient as it is. It was given, so differentiating it by the parameter raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, out: torch.Tensor) -> Any:  # noqa: ARG004  # pyright: ignore[reportIncompatibleMethodOverride]
        raise CapabilityError(
            "a gradient that was given has no derivative",
            where=_WHERE,
            fix="compute the total from fa.params(model), whose gradients have derivatives",
        )


def with_gradient(
    total: torch.Tensor, params: Mapping[str, torch.Tensor], grads: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """A total whose gradient with respect to `params` is `grads`, whatever made the total.

    The gradient of a step is then the sum of these over micro-batches and ranks, over the global weight: for
    clipped rows, evolution strategies, score functions and other estimators of your own.

    Args:
        total: 0-d tensor.
        params: parameters by name, as `fa.params(model)` gives them.
        grads: gradients by name, each of the shape of its parameter. A parameter without one gets zeros.

    Returns:
        The total, for `fa.Mean`.

    Raises:
        UnknownNameError: a gradient of a name that is no parameter.
        TreeMismatchError: a gradient has another shape than its parameter.
        ArgumentError: the total is no scalar tensor.
        CapabilityError: later, if the gradient is differentiated again.

    Example:
        >>> def loss_fn(model, batch):  # an evolution strategy: two evaluations, no backward
        ...     params = fa.params(model)
        ...     noise = {name: torch.randn_like(value) for name, value in params.items()}
        ...
        ...     def at(size):
        ...         moved = {name: value + size * noise[name] for name, value in params.items()}
        ...         return fa.call(model, moved, batch).square().sum()
        ...
        ...     with torch.no_grad():
        ...         up, down = at(0.1), at(-0.1)
        ...     grads = {name: (up - down) / 0.2 * value for name, value in noise.items()}
        ...     return fa.Mean(fa.with_gradient((up + down) / 2, params, grads), weight=len(batch))
        >>> loss_fn(torch.nn.Linear(3, 1), torch.ones(2, 3)).total.requires_grad
        True
    """
    scalar = isinstance(total, torch.Tensor) and total.dim() == 0  # pyright: ignore[reportUnnecessaryIsInstance]
    if not scalar:
        raise ArgumentError(
            "the total is no scalar tensor",
            where=_WHERE,
            fix="sum it: with_gradient(total.sum(), params, grads)",
        )
    for name, grad in grads.items():
        if name not in params:
            raise UnknownNameError(
                f"there is a gradient of {name!r}, which is no parameter",
                where=_WHERE,
                fix=nearest(name, params),
            )
        if grad.shape != params[name].shape:
            raise TreeMismatchError(
                f"the gradient of {name!r} has shape {list(grad.shape)}, not {list(params[name].shape)}",
                where=_WHERE,
                fix="give each gradient the shape of its parameter",
            )
    given = [grads[n].detach() if n in grads else torch.zeros_like(p) for n, p in params.items()]
    apply: Any = (_Given if torch.compiler.is_compiling() else _GivenOnce).apply
    return apply(total.detach(), len(given), *params.values(), *given)
