"""Models without values, of any size and any class."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fnaccel.models.meta import making


@contextlib.contextmanager
def empty(*, buffers: bool = False) -> Generator[None]:
    """Build modules without values for their parameters, while the body runs: they take no memory.

    Parameters are on the meta device (https://docs.pytorch.org/docs/stable/meta.html). `fa.big.load` gives
    them values. Tied parameters stay tied, and initialization costs nothing. Modules that other threads build
    have their values.

    Args:
        buffers: put buffers on the meta device too. By default they keep their values: those that a
            checkpoint does not hold, such as masks and frequencies, can't be had from anywhere else.

    Example:
        >>> with fa.big.empty():
        ...     model = torch.nn.Linear(100_000, 100_000)
        >>> model.weight.device
        device(type='meta')
    """
    with contextlib.ExitStack() as stack:
        if buffers:
            stack.enter_context(torch.device("meta"))
        else:
            stack.enter_context(_LargeOnMeta())
        stack.enter_context(making("meta", "meta" if buffers else None))
        yield


class _LargeOnMeta(TorchFunctionMode):
    """Makes tensors of 1 GiB and more on the meta device: memory for one of 40 GB can't even be reserved."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options: dict[str, Any] = kwargs or {}
        if func in _FACTORIES and options.get("device") is None:
            tensor = func(*args, **{**options, "device": "meta"})
            if tensor.nbytes >= _LARGE:
                return tensor
        return func(*args, **options)


_LARGE = 1 << 30
_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}


@contextlib.contextmanager
def on(device: torch.device | str | int) -> Generator[None]:
    """Build modules on a device, while the body runs: parameters, buffers, and tensors that have no device.

    Args:
        device: a device of torch.

    Example:
        >>> with fa.big.on("meta"):
        ...     model = torch.nn.BatchNorm1d(4)
        >>> model.running_mean.device
        device(type='meta')
    """
    with torch.device(device), making(device, device):
        yield
