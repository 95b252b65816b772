"""Metrics of a step whose weights were bad on the device: reading them raises.

A step reads no tensor of an accelerator, so a negative or NaN weight there is noticed when the loss is read.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fnaccel import _torch
from fnaccel.errors import LossError
from fnaccel.step.loss import Scalar

_READERS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__format__", "__repr__")


class CheckedMetric(torch.Tensor):
    """A metric that raises when its value is read, if the global weight is not a valid one."""

    __torch_function__: Any = _torch.no_torch_function
    weight: torch.Tensor


def _reader(name: str) -> Any:
    read = getattr(torch.Tensor, name)

    def checked_read(self: CheckedMetric, *args: Any) -> Any:
        check_read(float(self.weight))
        return read(self.as_subclass(torch.Tensor), *args)

    return checked_read


for _name in _READERS:
    setattr(CheckedMetric, _name, _reader(_name))


def checked(metrics: dict[str, Any], uncounted: Scalar | None) -> dict[str, Any]:
    """Metrics whose loss and weight raise when they are read, if the weight turns out to be none.

    Args:
        metrics: the metrics of the step.
        uncounted: whether no row counts, by the weight. A tensor if only the device can tell.
    """
    if uncounted is False:
        if not isinstance(metrics["weight"], torch.Tensor):  # one rank knows it as a number
            device = metrics["loss"].device
            dtype = torch.float32 if device.type == "mps" else torch.float64
            metrics["weight"] = torch.scalar_tensor(metrics["weight"], dtype=dtype, device=device)
        return metrics
    plain = torch.as_tensor(metrics["weight"])
    if uncounted is True and float(plain) == 0:
        return metrics
    for name in ("loss", "weight"):
        metric = torch.as_tensor(metrics[name]).as_subclass(CheckedMetric)
        metric.weight = plain
        metrics[name] = metric
    return metrics


def check_read(weight: float) -> None:
    """Raise LossError if a global weight that was read is negative, infinite or NaN."""
    if not 0 <= weight < math.inf:
        raise LossError(
            "a weight of this step was negative, infinite or NaN, so its update was left out",
            where="the metrics of train_step(state, batch)",
            fix="give fa.Mean the number of rows or tokens its total stands for",
        )
