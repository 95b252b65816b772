"""torch's fused optimizer kernels, as they are called directly and as they stand in a compiled graph.

torch.compile knows no fused optimizer: in a graph each is one opaque operation of our own, which
calls the same kernel. It scales gradients itself: the kernel would write to them, and in a graph two of them
may be one tensor.
"""

from __future__ import annotations

import functools
import itertools
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


_ADAM = (  # the fields of `AdamUpdate`
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor updates, "
    "Tensor lr, float beta1, float beta2, float weight_decay, float eps, Tensor? scale, Tensor? skip) -> ()"
)
_SGD = (
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor lr, float momentum, "
    "float weight_decay, bool nesterov, Tensor? scale, Tensor? skip) -> ()"
)


_BEGIN, _PUT = "begin_(Tensor(a!)[] tensors) -> ()", "put_(Tensor(a!)[] targets, Tensor[] values) -> ()"


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
    for schema, body in ((_BEGIN, _begin), (_PUT, _put)):
        name = schema.partition("(")[0]
        library.define(schema, tags=_torch.EXACT_STRIDES)
        library.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fnaccel::{name}", lambda *_: None, lib=library)
    for name, (schema, kind, fused) in {
        "adam_": (_ADAM, AdamUpdate, _fused_adam),
        "adamw_": (_ADAM, AdamUpdate, _fused_adamw),
        "sgd_": (_SGD, SgdUpdate, _fused_sgd),
    }.items():
        library.define(name + schema, tags=_torch.EXACT_STRIDES)
        library.impl(name, functools.partial(_in_graph, kind, fused), "CompositeExplicitAutograd")
        torch.library.register_fake(f"fnaccel::{name}", lambda *_: None, lib=library)
    return library


def _begin(_: Tensors) -> None:
    _Begun.updates += 1


def _put(targets: Tensors, values: Tensors) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def begin(tensors: Tensors) -> None:
    """Note in a graph that these tensors begin to change. For updates that no operation here carries out."""
    torch.ops.fnaccel.begin_(tensors)


def _in_graph(kind: Callable[..., Any], fused: Callable[[Any], None], *args: Any) -> None:
    """The body of an operation. Of scaled gradients only those of a few parameters live at a time."""
    _Begun.updates += 1
    *fields, scale, skip = args
    if scale is None:
        fused(kind(*fields, skip=skip))
        return
    for part in _parts(fields[0]):
        params, grads, *rest = (field[part] if isinstance(field, list) else field for field in fields)
        fused(kind(params, _torch.foreach_div(grads, scale), *rest, skip=skip))


def _parts(params: Tensors) -> list[slice]:
    """Parameters one after the other in eighths, of 1 MiB at least."""
    ends = list(itertools.accumulate(param.numel() * param.element_size() for param in params))
    size = max(1 << 20, -(-ends[-1] // 8))
    starts = [i for i in range(1, len(ends)) if ends[i - 1] // size < ends[i] // size]
    return [slice(*pair) for pair in itertools.pairwise([0, *starts, len(ends)])]


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


def at(value: Any, device: torch.device) -> Any:
    """A tensor on a device, without a wait if it comes from the host. Anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.device == device:  # `to` would take 0.6 us
        return value
    return value.to(device, non_blocking=value.device.type == "cpu")  # to the host it could be read too soon


def on_device(rate: Scalar, device: torch.device) -> Scalar:
    """A rate on the device. On XLA as an input of the graph: a number would be part of it."""
    if isinstance(rate, torch.Tensor) or device.type != "xla":
        return at(rate, device)
    return as_input(rate, device)


def as_input(value: float, device: torch.device) -> torch.Tensor:
    """A number as a 0-d fp32 tensor, and an input of XLA's graph whatever its value.

    torch_xla takes a 0-d tensor of 0 or 1 for a constant, and two equal ones for one input (2.9): either
    would recompile the step.
    """
    return torch.tensor([value], dtype=torch.float32).to(device).reshape(())


def _dispatched(name: str, fused: Callable[[Any], None]) -> Callable[[Any], None]:
    """One update in place: torch's kernel, or our operation in a graph."""

    def apply(update: AdamUpdate | SgdUpdate) -> None:
        if torch.compiler.is_compiling():
            getattr(torch.ops.fnaccel, name)(*update)
        else:
            fused(update)

    return apply


_fused_adamw = functools.partial(_fused_adam, kernel=_torch.fused_adamw_)
adam_ = _dispatched("adam_", _fused_adam)
adamw_ = _dispatched("adamw_", _fused_adamw)
sgd_ = _dispatched("sgd_", _fused_sgd)
