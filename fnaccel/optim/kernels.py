"""torch's fused optimizer kernels, as they are called directly and as they stand in a compiled graph.

torch.compile knows no fused optimizer: in a graph each is one opaque operation of our own, which
calls the same kernel. It takes gradients that are scaled by then: with a scale the kernel would write to
them, and in a graph two of them may be one tensor.

The kernels walk over memory, so they would write into the gaps of a parameter that is not dense, and XLA has
none: `plain_*` do their arithmetic. On XLA all that changes between steps is a tensor, so that the graph
stays the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fnaccel import _torch
from fnaccel.step.loss import Scalar

_ADAM_LIKE = (
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] first, Tensor(c!)[] second, Tensor updates, "
    "Tensor rate, float beta1, float beta2, float weight_decay, float eps, Tensor? skip) -> ()"
)
_SGD = (
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] first, Tensor rate, float momentum, "
    "float weight_decay, bool nesterov, Tensor? skip) -> ()"
)


class _Begun:
    """How many updates compiled code has begun: after a failure, whether parameters may have changed."""

    updates = 0


def begun() -> int:
    """How many updates have begun in compiled code, in this process."""
    return _Begun.updates


@functools.cache
def _operations() -> Any:
    """Register the operations when a step is first compiled."""
    library = torch.library.Library("fnaccel", "DEF")
    bodies = {
        "adam_": (_ADAM_LIKE, functools.partial(_adam_body, _torch.fused_adam_)),
        "adamw_": (_ADAM_LIKE, functools.partial(_adam_body, _torch.fused_adamw_)),
        "sgd_": (_SGD, _sgd_body),
    }
    for name, (schema, body) in bodies.items():
        library.define(name + schema, tags=_torch.EXACT_STRIDES)
        library.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fnaccel::{name}", lambda *_: None, lib=library)
    return library, torch.ops.fnaccel


def register() -> None:
    """Make the operations known to torch.compile."""
    _operations()


def _adam_body(kernel: Callable[..., Any], *args: Any) -> None:
    _Begun.updates += 1
    *tensors, skip = args
    _run_adam(kernel, *tensors, scale=None, skip=skip)


def _sgd_body(*args: Any) -> None:
    _Begun.updates += 1
    *tensors, skip = args
    _run_sgd(*tensors, scale=None, skip=skip)


def _run_adam(
    kernel: Callable[..., Any],
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    first: Sequence[torch.Tensor],
    second: Sequence[torch.Tensor],
    updates: torch.Tensor,
    rate: Scalar,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    scale: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    kernel(
        params,
        grads,
        first,
        second,
        [],
        [updates] * len(params),
        lr=rate,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=scale,
        found_inf=skip,
    )


def _run_sgd(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    first: Sequence[torch.Tensor],
    rate: Scalar,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    scale: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    _torch.fused_sgd_(
        params,
        grads,
        first,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=rate,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
        grad_scale=scale,
        found_inf=skip,
    )


def _adam(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    first: Sequence[torch.Tensor],
    second: Sequence[torch.Tensor],
    updates: torch.Tensor,
    rate: Scalar,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    scale: torch.Tensor | None,
    skip: torch.Tensor | None,
    *,
    apart: bool,
) -> None:
    rate = _on_device(rate, params[0].device)
    updates = updates.to(torch.promote_types(params[0].dtype, updates.dtype))
    size = rate / _unbiased(beta1, updates)
    root = _unbiased(beta2, updates) ** 0.5
    for param, grad, mean, square in zip(params, grads, first, second, strict=True):
        value, slope = _wide(param), _scaled(grad, scale)
        if weight_decay and not apart:
            slope = slope + weight_decay * value
        if weight_decay and apart:
            value = value * (1.0 - rate * weight_decay)
        moved = torch.lerp(_wide(mean), slope, 1.0 - beta1)
        spread = beta2 * _wide(square) + (1.0 - beta2) * slope * slope
        _put(param, value - size * moved / (spread.sqrt() / root + eps), skip)
        _put(mean, moved, skip)
        _put(square, spread, skip)


def plain_sgd_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    first: Sequence[torch.Tensor],
    rate: Scalar,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    scale: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    """SGD in plain operations, with the arguments of `sgd_`."""
    rate = _on_device(rate, params[0].device)
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        value, slope = _wide(param), _scaled(grad, scale)
        if weight_decay:
            slope = slope + weight_decay * value
        if momentum:
            moved = momentum * _wide(first[index]) + slope
            _put(first[index], moved, skip)
            slope = slope + momentum * moved if nesterov else moved
        _put(param, value - rate * slope, skip)


def _unbiased(beta: float, updates: torch.Tensor) -> Any:
    """`1 - beta**updates`: as a difference it would lose half of fp32's digits when beta is near 1."""
    return -torch.expm1(updates * math.log(beta)) if beta else 1.0


def _on_device(rate: Scalar, device: torch.device) -> Scalar:
    """A rate on the device. On XLA as an input of the graph: a number would be part of it."""
    if isinstance(rate, torch.Tensor):
        return rate.to(device)
    return as_input(rate, device) if device.type == "xla" else rate


def as_input(value: float, device: torch.device) -> torch.Tensor:
    """A number as a 0-d fp32 tensor, and an input of XLA's graph whatever its value.

    torch_xla takes a 0-d tensor of 0 or 1 for a constant, and two equal ones for one input (2.9): either
    would recompile the step.
    """
    return torch.tensor([value], dtype=torch.float32).to(device).reshape(())


def _wide(value: torch.Tensor) -> torch.Tensor:
    """In fp32 at least, as the kernels compute."""
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _scaled(grad: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return _wide(grad) if scale is None else _wide(grad) / scale


def _put(target: torch.Tensor, value: torch.Tensor, skip: torch.Tensor | None) -> None:
    # not a product: a skipped value may be NaN
    target.copy_(value if skip is None else torch.where(skip > 0, _wide(target), value))


def _dispatched(name: str, fused: Callable[..., None], plain: Callable[..., None]) -> Callable[..., None]:
    """One update in place: torch's kernel, our operation in a graph, or plain operations on XLA."""

    def apply(*args: Any) -> None:
        if torch.compiler.is_compiling():
            *tensors, _, skip = args  # gradients are scaled by then
            getattr(torch.ops.fnaccel, name)(*tensors, skip)
        elif args[0][0].device.type == "xla":
            plain(*args)
        else:
            fused(*args)

    return apply


plain_adam_ = functools.partial(_adam, apart=False)
plain_adamw_ = functools.partial(_adam, apart=True)
adam_ = _dispatched("adam_", functools.partial(_run_adam, _torch.fused_adam_), plain_adam_)
adamw_ = _dispatched("adamw_", functools.partial(_run_adam, _torch.fused_adamw_), plain_adamw_)
sgd_ = _dispatched("sgd_", _run_sgd, plain_sgd_)
