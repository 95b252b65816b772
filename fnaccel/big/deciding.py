"""The decisions behind a device map: what stays together, what is split, and what runs on the CPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs
import torch
from torch import nn

from fnaccel.big.budget import Device
from fnaccel.big.layers import WHOLE, Layer, layers, split
from fnaccel.big.placing import Part, Strategy, buffers_fit, place, staying_buffers
from fnaccel.big.sizes import nbytes
from fnaccel.errors import ArgumentError
from fnaccel.texts import size_of

_WHERE = "fa.big.device_map"


@attrs.frozen
class Decision:
    """The device of each layer.

    Attributes:
        places: the device by path.
        tensors: the parameters and buffers of all layers, by name.
        on_cpu: layers that run on the CPU, in the order of the model.
        split: blocks that are split, in the order of the model.
        fetched_alone: offloaded layers inside a block that is fetched whole, unless a map names its layers.
        staying: bytes of buffers of offloaded layers, which stay on the run device.
        overflow: whether the run device can't hold these beside the largest layer that is fetched.
    """

    places: Mapping[str, Device]
    tensors: Mapping[str, torch.Tensor]
    on_cpu: tuple[str, ...]
    split: tuple[str, ...]
    fetched_alone: frozenset[str]
    staying: int
    overflow: bool


@attrs.frozen
class Deciding:
    """What a decision depends on.

    Attributes:
        model: with values or without.
        whole: its layers, before any is split.
        limits: bytes by device: accelerators, the CPU, the disk.
        strategy: see `fa.big.device_map`.
        bits: bits of a floating-point value. None: those of its dtype.
        lasting: `id`s of buffers that stay on the run device.
    """

    model: nn.Module
    whole: list[Layer]
    limits: Mapping[Device, int | None]
    strategy: Strategy
    bits: int | None
    lasting: Collection[int]

    @property
    def run(self) -> Device:
        """The device that runs offloaded layers."""
        return next(iter(self.limits))

    @property
    def _accelerators(self) -> list[Device]:
        return [device for device in self.limits if device not in ("cpu", "disk")]

    def decide(self) -> Decision:
        """Place the layers. Blocks are split if none fits, and if otherwise accelerators would be empty.

        Raises:
            ArgumentError: no device holds a layer.
        """
        decision = self._decide(set())
        if self._accelerators and not self._is_accelerated(decision):
            blocks = {layer.path for layer in self.whole if self._can_be_split(layer)}
            by_layer = self._decide(blocks)
            if self._is_accelerated(by_layer):
                return by_layer
        return decision

    def _is_accelerated(self, decision: Decision) -> bool:
        return any(device in self._accelerators for device in decision.places.values())

    def _decide(self, cut: set[str]) -> Decision:
        on_cpu: set[str] = set()
        far = [device for device in self.limits if device != self.run and device in ("cpu", "disk")]
        room = self.limits[self.run]
        while True:
            parts = split(self.whole, [layer for layer in self.whole if layer.path in cut], self.model)
            groups = _groups(parts)
            on_cpu = _with_blocks(on_cpu, groups, cut)
            offloadable = [group for group in groups if group[0].path not in on_cpu]
            left = self._beside([group for group in groups if group[0].path in on_cpu])
            usual = [self._part(group, cut) for group in offloadable]
            devices = self._place(usual, left)
            too_large = [
                group
                for group, part, device in zip(offloadable, usual, devices, strict=True)
                if device in far and room is not None and part.fetch > room
            ]
            if not too_large:
                break
            blocks = {layer.path for group in too_large for layer in group if self._can_be_split(layer)} - cut
            if not blocks and self.run == "cpu":
                raise self._refused(too_large[0])
            cut |= blocks
            on_cpu |= set() if blocks else {layer.path for group in too_large for layer in group}
        placement = dict(zip([group[0].path for group in offloadable], devices, strict=True))
        places = {layer.path: placement.get(group[0].path, "cpu") for group in groups for layer in group}
        away = {path for path, device in places.items() if device in far and path not in on_cpu}
        fetched_whole = {layer.path for layer in layers(self.model)} - {layer.path for layer in parts}
        on_run = sum(part.size for part, device in zip(usual, devices, strict=True) if device == self.run)
        return Decision(
            places,
            {name: tensor for layer in parts for name, tensor in layer.tensors.items()},
            tuple(path for path in places if path in on_cpu),
            tuple(layer.path for layer in self.whole if layer.path in cut),
            frozenset(path for path in away if _inside(path, fetched_whole)),
            staying_buffers(usual, devices, far),
            not buffers_fit(usual, devices, far, room, on_run),
        )

    def _place(self, parts: list[Part], limits: Mapping[Device, int | None]) -> list[Device]:
        devices = place(parts, list(limits.items()), self.strategy)
        if devices is None:
            total = sum(part.size for part in parts)
            raise ArgumentError(
                f"the model has {size_of(total)}, and the budget of the disk is too small for the rest",
                where=_WHERE,
                fix="leave the disk out of the budget: it has no bound by default",
            )
        return devices

    def _beside(self, groups: list[list[Layer]]) -> dict[Device, int | None]:
        """The limits, less the layers that run on the CPU.

        Raises:
            ArgumentError: the CPU can't hold them.
        """
        left = dict(self.limits)
        for group in groups:
            host, size = left.get("cpu"), self._size(group)
            if host is None or size > host:
                raise self._refused(group)
            left["cpu"] = host - size
        return left

    def _refused(self, group: list[Layer]) -> ArgumentError:
        """The error of layers that no device can run."""
        size, bounds = self._size(group), {d: n for d, n in self.limits.items() if d != "disk"}
        largest = max(bounds, key=lambda device: bounds[device] or 0)
        bound = bounds[largest] or 0
        name = group[0].path or "the model"
        if size <= bound and largest in self._accelerators:
            return ArgumentError(
                f"{name} has {size_of(size)} and would be offloaded. {self.run} runs offloaded layers, "
                f"and has {size_of(bounds[self.run] or 0)}",
                where=_WHERE,
                fix=f"name {largest!r} first in the budget: the first device runs offloaded layers",
            )
        return ArgumentError(
            f"{name} has {size_of(size)}, and no device of the budget can run "
            f"it: the largest is {largest} with {size_of(bound)}",
            where=_WHERE,
            fix=f'at least that for one device: {{{largest!r}: "{-(-size // (1 << 20))}MiB"}}',
        )

    def _can_be_split(self, layer: Layer) -> bool:
        """Whether a layer has inner layers that can run one by one."""
        if layer.path in layer.tensors:
            return False
        module = self.model.get_submodule(layer.path)
        return type(module).__name__ not in WHOLE and len(layers(module, ())) > 1

    def _part(self, group: list[Layer], cut: Collection[str]) -> Part:
        kept = [t for layer in group for t in layer.tensors.values() if id(t) in self.lasting]
        run_only = any(_inside(layer.path, cut) for layer in group)
        return Part(self._size(group), self._fetch(group), nbytes(kept, self.bits), run_only)

    def _size(self, group: list[Layer]) -> int:
        return nbytes([tensor for layer in group for tensor in layer.tensors.values()], self.bits)

    def _fetch(self, group: list[Layer]) -> int:
        """Bytes of the largest layer that is fetched."""
        fetched = ([t for t in layer.tensors.values() if id(t) not in self.lasting] for layer in group)
        return max(nbytes(tensors, self.bits) for tensors in fetched)


def _inside(path: str, modules: Collection[str]) -> bool:
    """Whether a path is below one of the modules."""
    while path:
        path = path.rpartition(".")[0]
        if path in modules:
            return True
    return False


def _with_blocks(on_cpu: set[str], groups: list[list[Layer]], cut: Collection[str]) -> set[str]:
    """The layers that run on the CPU, with all that must run there too: ties, and the block of a split one.

    A residual connection needs the whole block on one device.
    """
    while True:
        blocks = {block for block in cut if any(_inside(path, [block]) for path in on_cpu)}
        joined = {
            layer.path
            for group in groups
            if any(layer.path in on_cpu or _inside(layer.path, blocks) for layer in group)
            for layer in group
        }
        if joined == on_cpu:
            return on_cpu
        on_cpu = joined


def _groups(parts: list[Layer]) -> list[list[Layer]]:
    """Layers that share a tensor, together, at the place of the first."""
    group_of: dict[int, list[Layer]] = {}
    groups: list[list[Layer]] = []
    for layer in parts:
        shared = {id(g): g for t in layer.tensors.values() if (g := group_of.get(id(t))) is not None}
        joined, *others = list(shared.values()) or [[]]
        if not joined:
            groups.append(joined)
        for other in others:  # this layer ties two groups
            joined += other
            groups = [group for group in groups if group is not other]
        joined.append(layer)
        group_of |= {id(tensor): joined for member in joined for tensor in member.tensors.values()}
    return groups
