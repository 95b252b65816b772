"""Devices on the CPU: tensors carry the name of their device, and operations that mix devices raise."""

from __future__ import annotations

import threading
import weakref

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fnaccel.big import Mover

ANY = "any"


def device_of(tensor):
    """The device that a tensor's storage carries: views and parameters share it."""
    return getattr(tensor.untyped_storage(), "device_name", "cpu")


def set_device(tensor, device):
    tensor.untyped_storage().device_name = device


class Devices(TorchFunctionMode):
    """Results are on the device of the operands, and these must be on one.

    A tensor without operands (`torch.arange(..., device=x.device)`) may meet tensors of any device.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves([args, kwargs or {}]) if isinstance(x, torch.Tensor) and x.dim()]
        found = {device_of(x) for x in tensors} - {ANY}
        name = getattr(func, "__name__", "")
        if name not in ("__get__", "__set__") and len(found) > 1:
            raise AssertionError(f"{name} mixes {found}")
        result = func(*args, **(kwargs or {}))  # the mode is off in here
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and not hasattr(x.untyped_storage(), "device_name"):
                set_device(x, next(iter(found), ANY))
        return result


class Simulated(Mover):
    """Notes the moves, and how many bytes are on each device."""

    def __init__(self, count=2):
        super().__init__()
        self.count = count
        self.moves = []
        self.live = {}
        self.most = {}
        self._counting = threading.RLock()  # layers are fetched in a thread, and freed in any

    def check(self, device):
        if isinstance(device, int) and device >= self.count:
            super().check(device)

    def shown(self, device):
        return torch.device("cpu")

    def device_of(self, tensor):
        return device_of(tensor)

    def move(self, tensor, device):
        if device_of(tensor) == device:
            return tensor
        with torch._C.DisableTorchFunction():
            copy = tensor.detach().clone()
        set_device(copy, device)
        self.moves.append((tuple(tensor.shape), device_of(tensor), device))
        with self._counting:
            self.live[device] = self.live.get(device, 0) + copy.nbytes
            self.most[device] = max(self.most.get(device, 0), self.live[device])
        weakref.finalize(copy.untyped_storage(), self._freed, device, copy.nbytes)
        return copy

    def fetch(self, tensors, device):
        copies = [self.move(tensor, device) for tensor in tensors]
        return lambda: copies

    def home(self, tensor):
        return self.move(tensor, "cpu")

    def _freed(self, device, nbytes):
        with self._counting:
            self.live[device] -= nbytes
