"""Reads the tensors of a checkpoint: mapped, into memory, to a device, or by one rank for all."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fnaccel.big.device_map import DeviceMap
from fnaccel.big.mapped_pages import let_go
from fnaccel.big.mover import torch_device
from fnaccel.big.on_disk import ToWrite, write_folder
from fnaccel.big.planning import Options, Value
from fnaccel.big.quantized_source import Part
from fnaccel.checkpoint.format.boxes import whole
from fnaccel.checkpoint.format.found import Found
from fnaccel.interchange.fitting import Fit
from fnaccel.interchange.targets import Targets
from fnaccel.loop.progress import open_bar
from fnaccel.world.world import World

_WHERE = "fa.big.load"


def forget(entry: Found) -> None:
    """Let the pages of a mapped tensor go that was copied: they would count as memory of the process."""
    if entry.view is not None:
        let_go(entry.view())


def equal(first: Found, second: Found) -> bool:
    """Whether two stored tensors have the same values."""
    if first.shape != second.shape:
        return False
    one, other = tensor_of(first), tensor_of(second)
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other.to(one.dtype))


def tensor_of(entry: Found) -> torch.Tensor:
    """A stored tensor: mapped if it can be, or read."""
    if entry.view is not None:
        return entry.view()
    out = torch.empty(entry.shape, dtype=entry.dtype)
    entry.read(whole(entry.shape), out)
    return out


@attrs.frozen(eq=False)
class Reading:
    """How values are read, and their devices.

    Attributes:
        placed: the device of each tensor.
        options: the arguments of `fa.big.dispatch`.
        dtype: of floating-point tensors. `"stored"`: as in the checkpoint. None: as in the model.
        copy: whether values on the CPU are read into memory.
        readers: how many threads read.
        bar: whether to show a bar of bytes.
    """

    placed: DeviceMap
    options: Options
    dtype: torch.dtype | str | None
    copy: bool
    readers: int
    bar: bool

    def values(self, fitted: Fit, targets: Targets) -> dict[str, Value]:
        """The values of a model, by name."""
        paths = list(fitted.pairs)
        to_disk = [path for path in paths if self._stays(path) and fitted.pairs[path].view is None]
        files = write_folder(
            {
                path: ToWrite(
                    fitted.pairs[path].nbytes,
                    lambda path=path: self._in_memory(path, fitted.pairs[path], targets),
                )
                for path in to_disk
            },
            self.options.folder,
            _WHERE,
        )
        values = {path: Value(tensor, mapped=True) for path, tensor in files.items()}
        unwritten = [path for path in paths if path not in values]
        bar: Any = None
        if self.bar:
            bar = open_bar(sum(entry.nbytes for entry in fitted.pairs.values()), 0, unit="B")
        with ThreadPoolExecutor(self.readers) as pool, bar or contextlib.nullcontext():
            read = pool.map(lambda path: self._value(path, fitted.pairs[path], targets), unwritten)
            for path, value in zip(unwritten, read, strict=True):
                values[path] = value
                if bar is not None:
                    bar.update(fitted.pairs[path].nbytes)
        return named(values, targets)

    def fill(self, parts: list[Part]) -> None:
        """Give quantized layers their codes. A weight in full width is quantized on its device."""

        def fill_one(part: Part) -> None:
            home = self.placed.device_of(part.path)
            device = "cpu" if home in ("cpu", "disk") else torch_device(home)
            for suffix, entry in part.tensors.items():
                part.layer.fill(suffix, tensor_of(entry), device)
                forget(entry)

        with ThreadPoolExecutor(self.readers) as pool:
            list(pool.map(fill_one, parts))

    def _stays(self, path: str) -> bool:
        """Whether a tensor stays on the disk."""
        section, _, name = path.partition("/")
        return self.placed.device_of(name) == "disk" and (section == "params" or self.options.offload_buffers)

    def _value(self, path: str, entry: Found, targets: Targets) -> Value:
        home = self.placed.device_of(path.partition("/")[2])
        dtype = self.wanted(entry.dtype, targets.tensors[path])
        if entry.view is not None and self._stays(path):
            return Value(entry.view(), mapped=True, dtype=dtype)
        if home in ("cpu", "disk"):
            if entry.view is not None and entry.dtype == dtype and not self.copy:
                return Value(entry.view())
            return Value(self._in_memory(path, entry, targets))
        moved = Value(self.options.mover.move(tensor_of(entry).to(dtype), home))
        forget(entry)
        return moved

    def _in_memory(self, path: str, entry: Found, targets: Targets) -> torch.Tensor:
        out = torch.empty(entry.shape, dtype=self.wanted(entry.dtype, targets.tensors[path]))
        if entry.view is not None:
            out.copy_(entry.view())
            forget(entry)
        else:
            entry.read(whole(entry.shape), out)
        return out

    def wanted(self, stored: torch.dtype, target: torch.Tensor) -> torch.dtype:
        """The dtype that a tensor will have."""
        if not target.is_floating_point():
            return target.dtype
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        return stored if self.dtype == "stored" else target.dtype


def named(values: Mapping[str, Value], targets: Targets) -> dict[str, Value]:
    """Values by name instead of by path, also for the further names of tied tensors."""
    result = {path.partition("/")[2]: value for path, value in values.items()}
    for path, first in targets.tied.items():
        if first in values:
            result[path.partition("/")[2]] = values[first]
    return result


def sent_by_first(
    fits: list[Fit], stored: dict[str, torch.dtype], targets: Targets, reading: Reading, ranks: World
) -> dict[str, Value]:
    """The values that rank 0 reads and sends to all. Every rank must call it.

    Args:
        fits: the tensors of the checkpoint. Empty on other ranks.
        stored: their dtypes by path, the same on all ranks.
        targets: the tensors of the model.
        reading: how values are read.
        ranks: the ranks.
    """
    values: dict[str, Value] = {}
    for path, dtype in stored.items():
        target = targets.tensors[path]
        value = torch.empty(target.shape, dtype=reading.wanted(dtype, target), device=ranks.device)
        if fits:
            value.copy_(tensor_of(fits[0].pairs[path]))
        dist.broadcast(value, 0)
        home = reading.placed.device_of(path.partition("/")[2])
        values[path] = Value(value if home == "disk" else reading.options.mover.move(value, home))
    return named(values, targets)
