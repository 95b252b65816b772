"""Device maps: which device holds each layer. Values that are printed, compared, and written as JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from fnaccel.big.budget import Budget, Device, check_device, detected_budget, read_budget
from fnaccel.big.deciding import Deciding, Decision
from fnaccel.big.layers import lasting_buffers, layers
from fnaccel.big.placing import STRATEGIES, Strategy
from fnaccel.big.sizes import Dtype, bits_of, nbytes
from fnaccel.errors import ArgumentError, UnknownNameError, nearest
from fnaccel.models.layers import folded
from fnaccel.texts import size_of
from fnaccel.world.plain_data import load_json

_FALLBACK = "run on the CPU, where they are: no accelerator of the budget has room for one of them"
_SPLIT = "split, because no accelerator of the budget has room for one of them and for what is fetched"

_LONGEST = 1 << 26
"""Characters of a map: one of a large model has sizes of thousands of modules."""


def _devices(places: Mapping[str, Device]) -> dict[str, Device]:
    return {str(path): check_device(device) for path, device in places.items()}


@attrs.frozen
class DeviceMap(Mapping[str, Device]):
    """The device of each module or tensor, by its path. A longer path counts before a shorter one.

    Attributes:
        places: an accelerator's index, `"cpu"`, `"disk"`, or a device of torch by name.
        on_cpu: paths of layers that run on the CPU, because no accelerator holds them. Other layers on the
            CPU and on the disk run on the first accelerator of the map, if it has one.
        sizes: bytes of each place, if they are known.
        budget: bytes that each device may hold, if they are known. The disk has no bound.
        notes: decisions and their reasons.
        offload_buffers: whether buffers of layers on the CPU and on the disk are there too. Otherwise the
            device that runs the layer holds them.
        buffers: bytes of the buffers that this device holds, by place. They are part of `sizes`.

    Example:
        >>> fa.big.DeviceMap({"embed": 0, "blocks": "cpu", "head": 0}).devices
        (0, 'cpu')
    """

    places: Mapping[str, Device] = attrs.field(converter=_devices)
    on_cpu: frozenset[str] = attrs.field(default=frozenset(), converter=frozenset)
    sizes: Mapping[str, int] = attrs.field(factory=dict, eq=False)
    budget: Mapping[Device, int | None] = attrs.field(factory=dict, eq=False)
    notes: tuple[str, ...] = attrs.field(default=(), eq=False)
    offload_buffers: bool = False
    buffers: Mapping[str, int] = attrs.field(factory=dict, eq=False)

    def __getitem__(self, path: str) -> Device:
        return self.places[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __hash__(self) -> int:
        return hash((tuple(self.places.items()), self.on_cpu))

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices in use, in the order of the map."""
        return tuple(dict.fromkeys(self.places.values()))

    @property
    def main(self) -> Device:
        """The device that runs layers which are on the CPU or on the disk."""
        return next((d for d in [*self.budget, *self.devices] if d not in ("cpu", "disk")), "cpu")

    def device_of(self, name: str) -> Device:
        """The device of a module or tensor, by its full name.

        Raises:
            ArgumentError: the map does not cover it.
        """
        place = place_of(name, self.places)
        if place is None:
            raise ArgumentError(
                f"the map has no device for {name}",
                where="a device map",
                fix=f"name it, or a module around it{_end}",
            )
        return self.places[place]

    def check(self, model: nn.Module) -> None:
        """Check that the map covers each tensor of a model, and names nothing else.

        Raises:
            ArgumentError: lists tensors without a device, or names that the model does not have.
        """
        names = {name for name, _ in model.named_modules(remove_duplicate=False)}
        tensors = [name for layer in layers(model) for name in layer.tensors]
        for path in self.places:
            if path not in names and path not in tensors:
                raise ArgumentError(
                    f"the map names {path!r}, which the model does not have",
                    where="a device map",
                    fix=nearest(path, [*names, *tensors]),
                )
        missing = [name for name in dict.fromkeys(tensors) if place_of(name, self.places) is None]
        if missing:
            raise ArgumentError(
                f"the map has no device for {folded(missing)}",
                where="a device map",
                fix=f"name {'them' if len(missing) > 1 else 'it'}, or a module around{_end}",
            )

    def to_json(self) -> str:
        """The map as a JSON object of paths and devices, with notes and sizes."""
        content = {
            "places": dict(self.places),
            "on_cpu": sorted(self.on_cpu),
            "sizes": dict(self.sizes),
            "budget": [[device, limit] for device, limit in self.budget.items()],
            "notes": list(self.notes),
            "offload_buffers": self.offload_buffers,
            "buffers": dict(self.buffers),
        }
        return json.dumps(content, indent=1)

    @classmethod
    def from_json(cls, text: str) -> DeviceMap:
        """A map from `to_json`, or from a plain object of paths and devices.

        Raises:
            ArgumentError: the text is neither.
        """
        try:
            content: Any = load_json(text, longest=_LONGEST)
            if not isinstance(content, dict):
                raise TypeError
            if not isinstance(content.get("places"), dict):
                return cls(content)
            budget = dict(content.get("budget", ()))
            return cls(
                content["places"],
                content["on_cpu"],
                content["sizes"],
                budget,
                tuple(content["notes"]),
                content.get("offload_buffers", False),
                content.get("buffers", {}),
            )
        except (ValueError, TypeError, KeyError):
            raise ArgumentError(
                "the text is no device map",
                where="DeviceMap.from_json",
                fix='an object: {"embed": 0, "blocks": "cpu"}',
            ) from None

    def __str__(self) -> str:
        rows = [("device", "bytes", "of", "layers")]
        for device in dict.fromkeys([*self.budget, *self.devices]):
            paths = [path for path, placed in self.places.items() if placed == device]
            complete = all(path in self.sizes for path in paths)
            text = size_of(self._bytes_on(device, paths)) if complete else "?"
            limit = self.budget.get(device)
            if paths or device != "disk":
                rows.append((str(device), text, "" if limit is None else size_of(limit), _named(paths)))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *self.notes])

    def _bytes_on(self, device: Device, paths: list[str]) -> int:
        """Bytes of the places on a device, with the buffers that stay there."""
        staying = sum(self.buffers.values()) if device == self.main else 0
        return staying + sum(self.sizes[path] - self.buffers.get(path, 0) for path in paths)


_end = ". The key '' stands for all"


def _named(paths: list[str]) -> str:
    return "the model" if paths == [""] else folded(paths) or "-"


def as_map(placed: DeviceMap | Mapping[str, Device] | Device) -> DeviceMap:
    """A device map, from one, from a dict, or from one device for all.

    Raises:
        ArgumentError: a device is none.
    """
    if isinstance(placed, DeviceMap):
        return placed
    return DeviceMap(placed if isinstance(placed, Mapping) else {"": check_device(placed)})


def place_of(name: str, places: Mapping[str, Device]) -> str | None:
    """The longest path of a map that is a module or tensor, or a module around it."""
    while name:
        if name in places:
            return name
        name = name.rpartition(".")[0]
    return "" if "" in places else None


def device_map(
    model: nn.Module,
    budget: Budget | None = None,
    strategy: Strategy = "auto",
    *,
    no_split: Collection[str] | None = None,
    dtype: Dtype | None = None,
    offload_buffers: bool = False,
) -> DeviceMap:
    """Decide which device holds each layer. Same arguments, same map: nothing is moved.

    Layers are taken in the order of the model, and fill one device after the other: accelerators, then the
    CPU, then the disk. The first device also keeps room for the largest layer that is still to be placed,
    because layers on the CPU and on the disk run there. It keeps none if only so all layers fit on
    accelerators. Layers that share a tied parameter stay together, and count it once. Gaps are filled with
    later layers that would be offloaded, as far as possible.

    A layer that no accelerator has room for runs on the CPU. If that is a block that should not be split, its
    inner layers are placed one by one, on the first device or away from it. All blocks are split so if
    otherwise no accelerator would hold anything.

    Args:
        model: with values or without (`fa.big.empty`).
        budget: bytes by device: `{0: "10GiB", 1: "10GiB", "cpu": "30GiB"}`. A device that is not named is not
            used, but for the disk. By default the free memory of this machine less a part that the map names.
        strategy: `"balanced"` makes the fullest accelerator as empty as possible. `"auto"` does so too if
            the first accelerator can't hold the model, and takes it alone if it can. `"balanced_low_0"` gives
            the first only what the others can't hold. `"sequential"` fills one after the other. If the
            accelerators can't hold the model, all of these are `"sequential"`.
        no_split: classes of modules that stay on one device. By default those that the model names in
            `_no_split_modules`, or else the classes of its blocks.
        dtype: the dtype that the model will have, as in `fa.big.sizes`.
        offload_buffers: count buffers of layers on the CPU and on the disk there. By default they count on
            the device that runs the layer, where `dispatch` leaves them. `dispatch` and `load` read that
            from the map.

    Raises:
        ArgumentError: no device holds a layer, or a budget can't be read.
        UnknownNameError: no such strategy or dtype.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 5))
        >>> print(fa.big.device_map(model, {0: 200, 1: 200}))
        device  bytes     of  layers
        0        64 B  200 B  0
        1       172 B  200 B  1-2
    """
    if strategy not in STRATEGIES:
        raise UnknownNameError(
            f"no strategy is called {strategy!r}",
            where="fa.big.device_map",
            fix=nearest(strategy, STRATEGIES),
        )
    notes: list[str] = []
    if budget is None:
        budget, kept = detected_budget()
        notes.append(kept)
    limits = read_budget(budget)
    bits = bits_of(dtype)
    whole = layers(model, no_split)
    lasting = set[int]() if offload_buffers else lasting_buffers(model)
    deciding = Deciding(model, whole, limits, strategy, bits, lasting)
    decision = deciding.decide()
    if decision.on_cpu:
        notes.append(f"{folded(decision.on_cpu)}: {_FALLBACK}")
    if decision.split:
        notes.append(f"{folded(decision.split)}: {_SPLIT}")
    if decision.overflow:
        notes.append(_overflowing(deciding, decision))
    merged = _merged(model, decision.places, decision.fetched_alone.union(decision.on_cpu))
    away = {path for path, device in merged.items() if device in ("cpu", "disk") and device != deciding.run}
    staying = {
        name: tensor
        for name, tensor in decision.tensors.items()
        if id(tensor) in deciding.lasting and place_of(name, merged) in away.difference(decision.on_cpu)
    }
    return DeviceMap(
        merged,
        frozenset(decision.on_cpu),
        _sizes(merged, decision.tensors, bits),
        limits,
        tuple(notes),
        offload_buffers,
        {path: count for path, count in _sizes(merged, staying, bits).items() if count},
    )


def _overflowing(deciding: Deciding, decision: Decision) -> str:
    """A note about buffers that do not fit."""
    run, limit = deciding.run, deciding.limits[deciding.run]
    note = (
        f"{size_of(decision.staying)} of buffers of offloaded layers stay on {run}, which can't hold them "
        f"beside a layer: it has {size_of(limit or 0)}"
    )
    try:
        attrs.evolve(deciding, lasting=()).decide()
    except ArgumentError:
        return note
    return f"{note}. They fit with offload_buffers=True"


def _merged(model: nn.Module, places: Mapping[str, Device], apart: frozenset[str]) -> dict[str, Device]:
    """The places, with one entry for a module whose layers are all on one device."""

    def visit(path: str, module: nn.Module) -> dict[str, Device]:
        if path in places:
            return {path: places[path]}
        prefix = f"{path}." if path else ""
        direct = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        placement = {prefix + name: places[prefix + name] for name, _ in direct if prefix + name in places}
        for name, child in module.named_children():
            placement |= visit(prefix + name, child)
        if len(set(placement.values())) == 1 and not apart.intersection(placement):
            return {path: next(iter(placement.values()))}
        return placement

    return visit("", model)


def _sizes(
    places: Mapping[str, Device], tensors: Mapping[str, torch.Tensor], bits: int | None
) -> dict[str, int]:
    """Bytes of each place. A tied tensor counts at the first."""
    seen: set[int] = set()
    counts = dict.fromkeys(places, 0)
    for name, tensor in tensors.items():
        place = place_of(name, places)
        if place is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            counts[place] += nbytes([tensor], bits)
    return counts
