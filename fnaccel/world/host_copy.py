"""`HostCopy`: the value of a tensor on the host, read later, so that no step waits for the device."""

from __future__ import annotations

from typing import Any

import torch


class HostCopy:
    """A copy of a tensor on the host that is still on its way, in pinned memory.

    A tensor of a CPU is kept as it is. So is one of torch-xla, which reads tensors of earlier steps without a
    wait.
    """

    __slots__ = ("_arrival", "_host")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        self._arrival: Any = None
        if tensor.device.type not in ("cpu", "xla"):
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrival = torch.Event(tensor.device.type)
            self._arrival.record()

    @property
    def arrived(self) -> bool:
        """Whether `read` returns at once."""
        return self._arrival is None or self._arrival.query()

    def read(self) -> torch.Tensor:
        """The tensor, after a wait for the copy."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._host
