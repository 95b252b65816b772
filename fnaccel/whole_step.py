"""Forward and backward of a micro-batch captured as one graph, on a model without hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fnaccel import _torch
from fnaccel.engine import Engine, Loss, Micro
from fnaccel.loss import check_attached, read_loss
from fnaccel.reports import Report
from fnaccel.transforms.compilation import Compile


def whole_step(engine: Engine, loss: Loss, settings: Compile) -> Callable[..., None]:
    """What `Engine.whole` runs: gradients by `torch.autograd.grad`, in the graph of the forward."""
    params = [leaf.param for leaf in engine.leaves]

    def forward_backward(data: Any, up_front: torch.Tensor) -> tuple[Any, ...]:
        total, weight, aux = read_loss(loss.fn(engine.model, data), loss.where)
        check_attached(total, loss.where)
        grads = torch.autograd.grad(total * up_front, params, allow_unused=True)
        return total.detach(), weight, aux, grads

    compiled = settings.compiled(forward_backward, fullgraph=True)

    def run(micro: Micro, up_front: Any, report: Report, last: bool) -> None:
        factor = torch.as_tensor(1.0 if up_front is None else up_front, dtype=torch.float32)
        with _torch.trace_autograd_ops():
            total, weight, aux, grads = compiled(micro.data, factor * float(micro.valid > 0))
        report.take(total, weight, aux, valid=micro.valid > 0)
        if last:
            report.send()
        for param, grad in zip(params, grads, strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad + grad

    return run
