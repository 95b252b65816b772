"""The tensor that stands in a module while its values are elsewhere. To compute with it raises.

A plain tensor on the meta device would not do: `linear` of torch 2.13 takes one beside a tensor on the CPU
and returns memory that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fnaccel.errors import CapabilityError

_ALLOWED = {
    "__get__", "__set__", "__repr__", "__hash__", "__len__", "size", "dim", "ndimension", "numel", "nelement",
    "stride", "element_size", "is_floating_point", "is_complex", "is_contiguous", "detach", "requires_grad_",
    "get_device", "untyped_storage", "storage_offset", "data_ptr",
}  # fmt: skip


class Away(torch.Tensor):
    """A tensor without values. It has a shape, a dtype, and the name of the tensor that it stands for."""

    stands_for: str
    runs_on: torch.device

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return args[0].runs_on  # what a model makes there meets the layer's own output
        if getattr(func, "__name__", "") in _ALLOWED:
            return super().__torch_function__(func, types, args, kwargs or {})
        operands = [x for x in [*args, *(kwargs or {}).values()] if isinstance(x, Away)]
        name = getattr(operands[0], "stands_for", "a tensor") if operands else "a tensor"
        raise CapabilityError(
            f"{name} is not on its device: it was read, and its module was not called",
            where="a dispatched model",
            fix='preload=["ClassAroundIt"] fetches a module whole, and so does run.fetched("path")',
        )


class AwayParameter(Away):
    """The same for a parameter, which `isinstance(..., torch.nn.Parameter)` takes for one."""

    _is_param = True


def away(tensor: torch.Tensor, name: str, device: torch.device, dtype: torch.dtype) -> Away:
    """The stand-in for a tensor: a parameter if this is one. It shows the device and dtype of its layer."""
    parameter = isinstance(tensor, nn.Parameter)
    empty: Any = torch.empty_like(tensor, device="meta", dtype=dtype, requires_grad=False).detach()
    empty = empty.as_subclass(AwayParameter if parameter else Away)
    empty.stands_for, empty.runs_on = name, device
    return empty.requires_grad_(parameter and tensor.requires_grad)
