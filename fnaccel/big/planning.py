"""From a device map to units: modules with hooks, their devices, and the tensors fetched for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from fnaccel import _torch
from fnaccel.big.away import Away, away
from fnaccel.big.budget import Device, check_device
from fnaccel.big.device_map import DeviceMap, place_of
from fnaccel.big.layers import Layer, classes_not_split, layers, split
from fnaccel.big.mover import Mover
from fnaccel.big.on_disk import ToWrite, write_folder
from fnaccel.big.unit import Slot, Unit, put
from fnaccel.errors import ArgumentError, as_names, require
from fnaccel.models.constant_buffers import ConstantBuffers

_WHERE = "fa.big.dispatch"


@attrs.frozen
class Value:
    """A tensor for a parameter or buffer.

    Attributes:
        tensor: its values, on the CPU or on their device.
        mapped: whether they are in a mapped file.
        dtype: the dtype to compute with. None: its own.
    """

    tensor: torch.Tensor
    mapped: bool = False
    dtype: torch.dtype | None = None


Values = Mapping[str, Value]


def _keys(names: Iterable[str] | str) -> frozenset[str]:
    return frozenset(as_names(names))


@attrs.frozen(kw_only=True)
class Options:
    """The arguments of `fa.big.dispatch`, and two that only `fa.big.offload` has.

    Attributes:
        keep: whether layers stay on their device after they ran.
        after: another dispatch that is sent home before this model runs.
    """

    folder: Path | None = None
    device: Device | None = attrs.field(default=None, converter=attrs.converters.optional(check_device))
    prefetch: int = 1
    offload_buffers: bool = False
    preload: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    skip_keys: frozenset[str] = attrs.field(default=frozenset(), converter=_keys)
    mover: Mover = attrs.field(factory=Mover)
    keep: bool = False
    after: Any = None

    def __attrs_post_init__(self) -> None:
        require(
            type(self.prefetch) is int and self.prefetch >= 0,
            f"prefetch={self.prefetch!r}",
            _WHERE,
            "0 or more layers: 1 hides most of the time of a fetch",
        )
        require(
            self.device != "disk",
            'device="disk"',
            _WHERE,
            'layers run on "cpu" or on an accelerator: an index (0), or "cuda:1"',
        )


def plan(
    model: nn.Module, placed: DeviceMap, values: Values, options: Options
) -> tuple[list[Unit], list[Slot]]:
    """The units of a model in its order, and the places whose tensors were moved.

    All that can fail is checked first. Then tensors are moved and the modules changed.

    Raises:
        ArgumentError: see `fa.big.dispatch`.
        CapabilityError: this machine lacks a device of the map.
    """
    main = placed.main if options.device is None else options.device
    for device in {*placed.devices, main}:
        options.mover.check(device)
    units: dict[str, Unit] = {}
    slots: list[tuple[Unit, Slot, Device]] = []
    tied = _Tied()
    for layer in _layers(model, placed, options):
        for name, tensor in layer.tensors.items():
            path = layer.path if layer.path not in layer.tensors else layer.path.rpartition(".")[0]
            home = placed.device_of(name)
            runs = _runs_on(name, home, main, placed)
            unit = units.setdefault(path, Unit(path, model.get_submodule(path), runs))
            if unit.device != runs:
                raise ArgumentError(
                    f"{name} would run on {runs}, and the rest of {path or 'the model'} on {unit.device}",
                    where="a device map",
                    fix="place the tensors of one module together",
                )
            empty = tied.empty(tensor, name, options.mover.shown(runs), values)
            slots.append((unit, _slot(model, name, tensor, values, empty, options.mover), home))
    _check_values(slots)
    files = _written(slots, options)
    moved: list[Slot] = []
    for unit, slot, home in slots:
        if _is_fetched(unit, slot, home, options):
            _leave_at_home(slot, files, tied, options.mover)
            slot.in_place = slot.mapped and unit.device == "cpu" and slot.dtype in (None, slot.value.dtype)
            slot.version = 0 if slot.value.is_inference() else _torch.version_of(slot.value)
            unit.slots.append(slot)
        else:
            _move(slot, unit.device, tied, options.mover)
            moved.append(slot)
    everything = [*moved, *(slot for unit in units.values() for slot in unit.slots)]
    here = {id(slot) for slot in everything if slot.in_place} | {id(slot) for slot in moved}
    put(everything, [slot.value if id(slot) in here else slot.empty for slot in everything])
    return list(units.values()), moved


def _is_fetched(unit: Unit, slot: Slot, home: Device, options: Options) -> bool:
    """Whether a tensor comes to its layer when this runs. Buffers do if that is wanted, codes always."""
    away = home == "disk" or (home == "cpu" and unit.device != "cpu")
    weight = isinstance(slot.empty, nn.Parameter) or isinstance(slot.module, ConstantBuffers)
    return away and (weight or options.offload_buffers)


class _Tied:
    """The copies and stand-ins of each tensor, made once, so that tied ones stay tied."""

    def __init__(self) -> None:
        self._empty: dict[int, tuple[torch.Tensor, Away]] = {}
        self.copies: dict[tuple[int, Device], torch.Tensor] = {}

    def empty(self, original: torch.Tensor, name: str, device: torch.device, values: Values) -> Away:
        """A tensor without values like the original. The original is held, so that its id stays its own."""
        if id(original) not in self._empty:
            value = values.get(name, Value(original))
            stand_in = away(original, name, device, value.dtype or value.tensor.dtype)
            self._empty[id(original)] = original, stand_in
        return self._empty[id(original)][1]


def _layers(model: nn.Module, placed: DeviceMap, options: Options) -> list[Layer]:
    """The layers that are fetched whole. One that the map cuts in parts is split."""
    if options.keep:
        tensors = {name: tensor for layer in layers(model, ()) for name, tensor in layer.tensors.items()}
        return [Layer("", tensors)] if tensors else []
    preloaded = classes_not_split(model, options.preload, "preload=")
    parts = layers(model, classes_not_split(model) | preloaded)
    cut = [part for part in parts if len({place_of(name, placed.places) for name in part.tensors}) > 1]
    return split(parts, cut, model)


def _runs_on(name: str, home: Device, main: Device, placed: DeviceMap) -> Device:
    if home not in ("cpu", "disk"):
        return home
    apart = place_of(name, placed.places) in placed.on_cpu
    return "cpu" if apart else main


def _slot(
    model: nn.Module, name: str, tensor: torch.Tensor, values: Values, empty: Away, mover: Mover
) -> Slot:
    path, _, key = name.rpartition(".")
    value = values.get(name, Value(tensor))
    return Slot(
        model.get_submodule(path),
        key,
        name,
        empty,
        None if tensor.is_meta else tensor,
        value.tensor,
        "cpu" if tensor.is_meta else mover.device_of(tensor),
        value.mapped,
        value.dtype,
    )


def _check_values(slots: list[tuple[Unit, Slot, Device]]) -> None:
    empty = [slot.name for _, slot, _ in slots if slot.value.is_meta]
    if empty:
        raise ArgumentError(
            f"{empty[0]} has no values ({len(empty)} tensors in all)",
            where=_WHERE,
            fix="fa.big.load(model, checkpoint, placed) reads them",
        )


def _written(slots: list[tuple[Unit, Slot, Device]], options: Options) -> dict[int, torch.Tensor]:
    """Tensors for the disk, written to the folder and mapped, by `id` of the tensor in memory."""
    unwritten: dict[str, ToWrite] = {}
    names: dict[int, str] = {}
    for unit, slot, home in slots:
        fetched = home == "disk" and _is_fetched(unit, slot, home, options)
        if fetched and not slot.mapped and id(slot.value) not in names:
            names[id(slot.value)] = slot.name
            unwritten[slot.name] = ToWrite(slot.value.nbytes, lambda value=slot.value: value)
    files = write_folder(unwritten, options.folder, _WHERE)
    return {key: files[name] for key, name in names.items()}


def _leave_at_home(slot: Slot, files: Mapping[int, torch.Tensor], tied: _Tied, mover: Mover) -> None:
    """Give a slot its values as they stay while the layer is not in use."""
    original, slot.original = slot.original, None
    if slot.mapped:
        return
    if id(slot.value) in files:
        slot.value, slot.mapped = files[id(slot.value)], True
        return
    key = id(slot.value), "home"
    if key not in tied.copies:
        tied.copies[key] = mover.home(slot.value.detach())
    if original is slot.value and slot.origin == "cpu":
        slot.original = original
        slot.value.data = tied.copies[key]  # the same memory, or pinned
    slot.value = tied.copies[key]


def _move(slot: Slot, device: Device, tied: _Tied, mover: Mover) -> None:
    """Put the tensor of a slot on its device."""
    key = id(slot.value), device
    if key not in tied.copies:
        value = slot.computed()
        here = mover.device_of(value) == device
        tied.copies[key] = value if here else mover.move(value.detach(), device)
    if tied.copies[key] is not slot.original:
        slot.original = None
    slot.value = tied.copies[key]
