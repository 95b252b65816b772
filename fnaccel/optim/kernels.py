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
from typing import Any, NamedTuple

import torch

from fnaccel import _torch
from fnaccel.step.loss import Scalar

Tensors = Sequence[torch.Tensor]


class AdamUpdate(NamedTuple):
    """One update by Adam or AdamW: tensors of one dtype and device, changed in place, and numbers."""

    params: Tensors
    grads: Tensors
    exp_avgs: Tensors
    exp_avg_sqs: Tensors
    updates: torch.Tensor
    lr: Scalar
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    scale: torch.Tensor | None = None
    """Gradients are divided by it."""
    skip: torch.Tensor | None = None
    """1 if nothing may change."""


class SgdUpdate(NamedTuple):
    """One update by SGD: see `AdamUpdate`."""

    params: Tensors
    grads: Tensors
    momentum_buffers: Tensors
    lr: Scalar
    momentum: float
    weight_decay: float
    nesterov: bool
    scale: torch.Tensor | None = None
    skip: torch.Tensor | None = None


_ADAM = (  # the fields of `AdamUpdate` but the scale
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor updates, "
    "Tensor lr, float beta1, float beta2, float weight_decay, float eps, Tensor? skip) -> ()"
)
_SGD = (
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor lr, float momentum, "
    "float weight_decay, bool nesterov, Tensor? skip) -> ()"
)


class _Begun:
    """How many updates compiled code has begun: after a failure, whether parameters may have changed."""

    updates = 0


def begun() -> int:
    """How many updates have begun in compiled code, in this process."""
    return _Begun.updates


@functools.cache
def register() -> Any:
    """Make the operations known to torch.compile: when a step is first compiled."""
    library = torch.library.Library("fnaccel", "DEF")
    for name, (schema, kind, fused) in {
        "adam_": (_ADAM, AdamUpdate, _fused_adam),
        "adamw_": (_ADAM, AdamUpdate, _fused_adamw),
        "sgd_": (_SGD, SgdUpdate, _fused_sgd),
    }.items():
        library.define(name + schema, tags=_torch.EXACT_STRIDES)
        library.impl(name, functools.partial(_in_graph, kind, fused), "CompositeExplicitAutograd")
        torch.library.register_fake(f"fnaccel::{name}", lambda *_: None, lib=library)
    return library


def _in_graph(kind: Callable[..., Any], fused: Callable[[Any], None], *args: Any) -> None:
    """The body of an operation: gradients are scaled by then."""
    _Begun.updates += 1
    *fields, skip = args
    fused(kind(*fields, skip=skip))


def _fused_adam(update: AdamUpdate, kernel: Callable[..., None] = _torch.fused_adam_) -> None:
    kernel(
        update.params,
        update.grads,
        update.exp_avgs,
        update.exp_avg_sqs,
        [],
        [update.updates] * len(update.params),
        lr=update.lr,
        beta1=update.beta1,
        beta2=update.beta2,
        weight_decay=update.weight_decay,
        eps=update.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=update.scale,
        found_inf=update.skip,
    )


def _fused_sgd(update: SgdUpdate) -> None:
    _torch.fused_sgd_(
        update.params,
        update.grads,
        update.momentum_buffers,
        weight_decay=update.weight_decay,
        momentum=update.momentum,
        lr=update.lr,
        dampening=0.0,
        nesterov=update.nesterov,
        maximize=False,
        is_first_step=False,
        grad_scale=update.scale,
        found_inf=update.skip,
    )


def plain_adam_(update: AdamUpdate, *, decoupled: bool = False) -> None:
    """Adam in plain operations. `decoupled`: AdamW, whose weight decay is apart from the gradient."""
    beta1, beta2, weight_decay = update.beta1, update.beta2, update.weight_decay
    lr = _on_device(update.lr, update.params[0].device)
    updates = update.updates.to(torch.promote_types(update.params[0].dtype, update.updates.dtype))
    step_size = lr / _unbiased(beta1, updates)
    bias_correction2 = _unbiased(beta2, updates) ** 0.5
    for tensors in zip(update.params, update.grads, update.exp_avgs, update.exp_avg_sqs, strict=True):
        param, grad, exp_avg, exp_avg_sq = tensors
        value, grad = _wide(param), _scaled(grad, update.scale)
        if weight_decay and not decoupled:
            grad = grad + weight_decay * value
        if weight_decay and decoupled:
            value = value * (1.0 - lr * weight_decay)
        mean = torch.lerp(_wide(exp_avg), grad, 1.0 - beta1)
        square = beta2 * _wide(exp_avg_sq) + (1.0 - beta2) * grad * grad
        denom = square.sqrt() / bias_correction2 + update.eps
        _put(param, value - step_size * mean / denom, update.skip)
        _put(exp_avg, mean, update.skip)
        _put(exp_avg_sq, square, update.skip)


def plain_sgd_(update: SgdUpdate) -> None:
    """SGD in plain operations."""
    lr = _on_device(update.lr, update.params[0].device)
    for index, (param, grad) in enumerate(zip(update.params, update.grads, strict=True)):
        value, step = _wide(param), _scaled(grad, update.scale)
        if update.weight_decay:
            step = step + update.weight_decay * value
        if update.momentum:
            buffer = update.momentum * _wide(update.momentum_buffers[index]) + step
            _put(update.momentum_buffers[index], buffer, update.skip)
            step = step + update.momentum * buffer if update.nesterov else buffer
        _put(param, value - lr * step, update.skip)


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


def _dispatched(
    name: str, fused: Callable[[Any], None], plain: Callable[[Any], None]
) -> Callable[[Any], None]:
    """One update in place: torch's kernel, our operation in a graph, or plain operations on XLA."""

    def apply(update: AdamUpdate | SgdUpdate) -> None:
        if torch.compiler.is_compiling():
            *fields, _, skip = update  # gradients are scaled by then
            getattr(torch.ops.fnaccel, name)(*fields, skip)
        elif update.params[0].device.type == "xla":
            plain(update)
        else:
            fused(update)

    return apply


_fused_adamw = functools.partial(_fused_adam, kernel=_torch.fused_adamw_)
plain_adamw_ = functools.partial(plain_adam_, decoupled=True)
adam_ = _dispatched("adam_", _fused_adam, plain_adam_)
adamw_ = _dispatched("adamw_", _fused_adamw, plain_adamw_)
sgd_ = _dispatched("sgd_", _fused_sgd, plain_sgd_)
