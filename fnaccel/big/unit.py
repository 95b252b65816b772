"""A layer that is fetched whole for its forward pass, and the places in modules that its tensors have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import attrs
import torch
from torch import nn

from fnaccel import _torch
from fnaccel.big.budget import Device
from fnaccel.models.constant_buffers import ConstantBuffers

Fetched = Callable[[], list[torch.Tensor]]
"""Gives tensors whose copies were begun before."""


@attrs.define(eq=False)
class Slot:
    """A place for a tensor in a module.

    Attributes:
        module, key: the module and its name for the tensor.
        name: the full name.
        original: what stood there before the model was dispatched, or a tensor without values like it.
        value: the values, in the memory of the host, in a mapped file, or on a device.
        origin: the device of the original.
        mapped: whether the values are in a mapped file.
        dtype: the dtype that the layer computes with. None: that of the values.
    """

    module: nn.Module
    key: str
    name: str
    original: torch.Tensor
    value: torch.Tensor
    origin: Device = "cpu"
    mapped: bool = False
    dtype: torch.dtype | None = None

    @property
    def is_weight(self) -> bool:
        """Whether it is a parameter, or the codes of a quantized weight."""
        return isinstance(self.original, nn.Parameter) or isinstance(self.module, ConstantBuffers)

    @property
    def in_place(self) -> bool:
        """Whether the layer can compute with the values as they are in the file."""
        return self.mapped and self.dtype in (None, self.value.dtype)

    def computed(self) -> torch.Tensor:
        """The values in the dtype that the layer computes with."""
        return self.value if self.dtype is None else self.value.to(self.dtype)

    def put(self, value: torch.Tensor) -> None:
        """Let the module see a tensor."""
        parameter = isinstance(self.original, nn.Parameter)
        held: Any = _torch.parameters_of(self.module) if parameter else _torch.buffers_of(self.module)
        held[self.key] = value

    def like_original(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor as a parameter if the original is one."""
        if isinstance(self.original, nn.Parameter) and not isinstance(value, nn.Parameter):
            return nn.Parameter(value, requires_grad=self.original.requires_grad)
        return value


def put(slots: Iterable[Slot], values: Iterable[torch.Tensor]) -> None:
    """Let modules see values. A tied parameter stays one parameter."""
    placed: dict[tuple[int, int], torch.Tensor] = {}
    for slot, value in zip(slots, values, strict=True):
        key = id(slot.original), id(slot.value)
        if key not in placed:
            placed[key] = slot.like_original(value)
        slot.put(placed[key])


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device, and a parameter if this is one."""
    if not isinstance(tensor, nn.Parameter):
        return torch.empty_like(tensor, device="meta")
    return nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad)


@attrs.define(eq=False)
class Unit:
    """A layer.

    Attributes:
        path: of the module whose forward pass needs it.
        module: this module.
        device: where it runs.
        slots: the tensors that are fetched for it. Others stay on its device.
        empty: what its module sees in their place while it is not in use.
        after: the unit that came next, the last time.
        depth: how many of its forward passes have begun and not ended.
        pending: its tensors, while they are fetched.
        here: whether they are on its device.
    """

    path: str
    module: nn.Module
    device: Device
    slots: list[Slot] = attrs.field(factory=list)
    empty: list[torch.Tensor] = attrs.field(factory=list)
    after: Unit | None = None
    depth: int = 0
    pending: Future[Fetched] | None = None
    here: bool = False

    @property
    def trained(self) -> bool:
        """Whether a parameter that is fetched wants a gradient."""
        return any(slot.original.requires_grad for slot in self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes that a fetch reads."""
        return sum(slot.value.nbytes for slot in self.slots)
