"""A layer that is fetched whole for its forward pass, and the places in modules that its tensors have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import attrs
import torch
from torch import nn

from fnaccel import _torch
from fnaccel.big.away import Away
from fnaccel.big.budget import Device
from fnaccel.big.mapped_pages import let_go
from fnaccel.errors import OwnershipError

Fetched = Callable[[], list[torch.Tensor]]
"""Gives tensors whose copies were begun before."""


@attrs.define(eq=False)
class Slot:
    """A place for a tensor in a module.

    Attributes:
        module, key: the module and its name for the tensor.
        name: the full name.
        empty: a tensor without values, which stands there while the layer is not in use. Tied names share it.
        original: the tensor from before the model was dispatched, or None if its values were let go.
        value: the values, in the memory of the host, in a mapped file, or on a device.
        origin: the device of the original.
        mapped: whether the values are in a mapped file.
        dtype: the dtype that the layer computes with. None: that of the values.
        in_place: whether the layer computes with the values in the mapped file.
        version: that of the values when they were mapped.
        seen: the tensor that the module was given last.
        shared: whether another unit has the same tensor.
    """

    module: nn.Module
    key: str
    name: str
    empty: Away
    original: torch.Tensor | None
    value: torch.Tensor
    origin: Device = "cpu"
    mapped: bool = False
    dtype: torch.dtype | None = None
    in_place: bool = False
    version: int = 0
    seen: torch.Tensor | None = None
    shared: bool = False

    def release(self) -> None:
        """Let the module see no values, or let the pages of its file go, unless somebody wrote to them."""
        if not self.in_place:
            if not self.replaced:
                self.put(self.empty)
        elif not self.value.is_inference() and _torch.version_of(self.value) == self.version:
            let_go(self.value)

    def computed(self) -> torch.Tensor:
        """The values in the dtype that the layer computes with."""
        return self.value if self.dtype is None else self.value.to(self.dtype)

    def put(self, value: torch.Tensor) -> None:
        """Let the module see a tensor."""
        self._registered[self.key] = self.seen = value

    @property
    def replaced(self) -> bool:
        """Whether somebody else gave the module another tensor."""
        return self.seen is not None and self._registered.get(self.key) is not self.seen

    @property
    def absent(self) -> bool:
        """Whether the module sees no values now."""
        return self._registered.get(self.key) is self.empty

    @property
    def registered(self) -> Any:
        """The tensor that the module sees now."""
        return self._registered.get(self.key)

    def check(self) -> None:
        """Raise OwnershipError if somebody else gave the module another tensor."""
        if self.replaced:
            raise OwnershipError(
                f"{self.name} was assigned while the model is dispatched",
                where="a dispatched model",
                fix="fa.big.dispatch_of(model).remove() keeps what was assigned. Dispatch it again",
            )

    @property
    def _registered(self) -> dict[str, Any]:
        parameter = isinstance(self.empty, nn.Parameter)
        return _torch.parameters_of(self.module) if parameter else _torch.buffers_of(self.module)

    def as_registered(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor as a parameter if the module has one there."""
        if isinstance(self.empty, nn.Parameter) and not isinstance(value, nn.Parameter):
            return nn.Parameter(value, requires_grad=self.empty.requires_grad)
        return value


def put(slots: Iterable[Slot], values: Iterable[torch.Tensor]) -> None:
    """Let modules see values. A tied parameter stays one parameter."""
    placed: dict[tuple[int, int], torch.Tensor] = {}
    for slot, value in zip(slots, values, strict=True):
        key = id(slot.empty), id(slot.value)
        if key not in placed:
            placed[key] = slot.as_registered(value)
        slot.put(placed[key])


def restore(slots: Iterable[Slot], move: Callable[[torch.Tensor, Device], torch.Tensor]) -> None:
    """Give modules plain tensors again: the originals, or their values on the device that these were on."""
    listed = [slot for slot in slots if not slot.replaced]
    placed: dict[int, torch.Tensor] = {}
    for slot in listed:
        if slot.original is not None:
            placed[id(slot.empty)] = slot.original.requires_grad_(slot.empty.requires_grad)
    for slot in listed:
        if id(slot.empty) not in placed:
            placed[id(slot.empty)] = slot.as_registered(move(slot.computed(), slot.origin))
        slot.put(placed[id(slot.empty)])


@attrs.define(eq=False)
class SharedCopy:
    """A copy of a tied tensor on a device, for all units that need it at one time."""

    fetched: Fetched


@attrs.define(eq=False)
class Unit:
    """A layer.

    Attributes:
        path: of the module whose forward pass needs it.
        module: this module.
        device: its device when it runs.
        slots: the tensors that are fetched for it. Others stay on its device.
        after: the unit that came next, the last time.
        depth: how many of its forward passes have begun and not ended.
        pending: its tensors, while they are fetched.
        here: whether they are on its device.
        copies: those of them that other units may share.
    """

    path: str
    module: nn.Module
    device: Device
    slots: list[Slot] = attrs.field(factory=list)
    after: Unit | None = None
    depth: int = 0
    pending: Future[Fetched] | None = None
    here: bool = False
    copies: list[SharedCopy] = attrs.field(factory=list)

    @property
    def trained(self) -> bool:
        """Whether a parameter that is fetched wants a gradient."""
        return any(slot.empty.requires_grad for slot in self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes that a fetch reads."""
        return sum(slot.value.nbytes for slot in self.slots)
