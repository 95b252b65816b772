"""Modules that run with their layers on several devices, in the memory of the host, or on the disk."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fnaccel import tree
from fnaccel.big import _torch
from fnaccel.big.budget import Device, check_device
from fnaccel.big.device_map import DeviceMap, as_map
from fnaccel.big.guards import guard, unguard
from fnaccel.big.mover import Mover
from fnaccel.big.planning import Options, Values, plan
from fnaccel.big.unit import Slot, Unit, put, restore
from fnaccel.big.walker import Counts, Walker
from fnaccel.errors import ArgumentError, CapabilityError, OwnershipError, require
from fnaccel.world.paths import optional_path

_KEY = "_fnaccel_dispatch"
_eager: Any = torch.compiler.disable  # a fetch can't be traced


class Dispatch:
    """A module whose layers come to their devices when they run. Made by `dispatch`, `load` and `offload`.

    The first pass notes the order of the layers. From the second one on, the next layers are fetched while
    one computes. A module may be called in another order: then a layer is fetched when it is needed, and
    `counts.out_of_order` says so. Inputs move to the device of a layer, and the output of the model to the
    device of its first input.

    Attributes:
        model: the module. It is called as before, without gradients.
        map: the device of each layer.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).requires_grad_(False)
        >>> run = fa.big.dispatch(model, {"0": "disk", "1": "cpu"}, folder="offload")
        >>> model(torch.ones(2, 64)).shape
        torch.Size([2, 8])
        >>> run.counts.fetched
        1
        >>> run.remove()
    """

    def __init__(
        self, model: nn.Module, placed: DeviceMap, units: list[Unit], moved: list[Slot], options: Options
    ) -> None:
        self.model = model
        self.map = placed
        self._units, self._moved, self._options = units, moved, options
        self._mover = options.mover
        self._walker = Walker(options.mover, options.prefetch)
        self._several = len({unit.device for unit in units}) > 1
        self._passes: dict[int, list[Device | None]] = {}  # by thread: the devices of the inputs
        self._hooks: list[Any] = []
        holders: dict[int, set[int]] = {}
        for unit in units:
            for slot in unit.slots:
                holders.setdefault(id(slot.value), set()).add(id(unit))
        for unit in units:
            for slot in unit.slots:
                slot.shared = len(holders[id(slot.value)]) > 1
            self._attach(unit)
        if not self._hooks and all(unit.device == "cpu" for unit in units):
            return  # a module as any other
        self._hooks += [
            model.register_forward_pre_hook(_eager(self._begin), prepend=True, with_kwargs=True),
            model.register_forward_hook(_eager(self._end), with_kwargs=True, always_call=True),
        ]
        parts: dict[nn.Module, list[Slot]] = {}  # state dicts of parts have values, too
        for slot in (slot for unit in units for slot in unit.slots):
            parts.setdefault(slot.module, []).append(slot)
        for module, slots in parts.items():
            self._hooks.append(module.register_state_dict_post_hook(_with_values(slots)))
        model.__dict__[_KEY] = self
        guard(model, copied=None if parts else self._copied)

    @property
    def counts(self) -> Counts:
        """The number of layers and bytes fetched so far."""
        return self._walker.counts

    def remove(self) -> None:
        """Take the hooks away, and give the module plain tensors again.

        Tensors go back to the devices that they came from. Values on the disk stay there, as
        tensors of a mapped file: they can be used as any other, and are read when they are.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._walker.close()
        self.model.__dict__.pop(_KEY, None)
        unguard(self.model)
        fetched = [slot for unit in self._units for slot in unit.slots]
        restore([*fetched, *self._moved], self._mover.move)
        self._units, self._moved = [], []

    def send_home(self) -> None:
        """Take all layers away from their device, those that were fetched ahead too."""
        self._walker.drop()
        for unit in self._units:
            if unit.here:
                self._walker.release(unit)

    @contextlib.contextmanager
    def fetched(self, path: str = "", device: Device | None = None) -> Generator[nn.Module]:
        """Have the values of a module in place while the body runs, outside of a forward pass.

        Args:
            path: of the module. By default the whole model.
            device: the device of all its values in the body, to read them there. By default those that are
                offloaded come to the device that runs their layer, and others stay where they are.

        Raises:
            ArgumentError: the device can hold no tensor that is used.
            CapabilityError: this machine lacks the device.
        """
        inside = [unit for unit in self._units if unit.slots and _below(unit.path, path)]
        if device is not None:
            moved = [slot for slot in self._moved if _below(slot.name.rpartition(".")[0], path)]
            slots = [*moved, *(slot for unit in inside for slot in unit.slots)]
            with _elsewhere(slots, _usable(device, self._mover), self._mover):
                yield self.model.get_submodule(path)
            return
        kept = [unit.here for unit in inside]
        with contextlib.ExitStack() as stack:
            for unit, keep in zip(inside, kept, strict=True):
                self._walker.bring(unit)
                stack.callback(self._walker.leave, unit, keep=keep)
            yield self.model.get_submodule(path)

    def _copied(self, memo: dict[int, Any]) -> nn.Module:
        """A deep copy of the model with a dispatch of its own: all tensors are on devices that run them."""
        self.model.__dict__.pop(_KEY)
        unguard(self.model)
        try:
            other = copy.deepcopy(self.model, memo)
        finally:
            self.model.__dict__[_KEY] = self
            guard(self.model, copied=self._copied)
        ids = {hook.id for hook in self._hooks}
        for module in other.modules():
            _torch.drop_hooks(module, ids)
        dispatched(other, self.map, {}, self._options)
        return other

    def _attach(self, unit: Unit) -> None:
        if not (unit.slots or self._several):
            return

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if unit.slots:
                self._walker.enter(unit)
            return self._placed(args, kwargs, unit.device) if self._several else None

        def leave(*_: object) -> None:
            self._walker.leave(unit, keep=self._options.keep)

        self._hooks.append(
            unit.module.register_forward_pre_hook(_eager(enter), prepend=True, with_kwargs=True)
        )
        if unit.slots:
            self._hooks.append(unit.module.register_forward_hook(_eager(leave), always_call=True))

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._options.after is not None:
            self._options.after.send_home()
        passes = self._passes.setdefault(threading.get_ident(), [])
        if len(passes) > self._calls_on_the_stack() - 1:  # a pass of this thread was interrupted
            passes.clear()
            if not any(self._passes.values()):
                for unit in self._units:
                    if unit.depth:
                        self._walker.release(unit)
        tensors = [leaf for leaf in tree.leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
        passes.append(self._mover.device_of(tensors[0]) if tensors else None)
        if self._several or not self._units:
            return None
        return self._placed(args, kwargs, self._units[0].device)

    def _end(self, _: nn.Module, __: object, ___: object, output: Any) -> Any:
        passes = self._passes.get(threading.get_ident(), [])
        came_from = passes.pop() if passes else None
        if not passes:
            self._passes.pop(threading.get_ident(), None)
        return None if came_from is None else self._on(output, came_from)

    def _calls_on_the_stack(self) -> int:
        """How many forward passes of the model this thread is in, this one included."""
        count, frame = 0, inspect.currentframe()
        while frame is not None:
            count += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is self.model
            frame = frame.f_back
        return count

    def _placed(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: Device) -> Any:
        skip = self._options.skip_keys
        return (
            tuple(self._on(value, device) for value in args),
            {key: value if key in skip else self._on(value, device) for key, value in kwargs.items()},
        )

    def _on(self, value: Any, device: Device) -> Any:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if self._mover.device_of(tensor) == device else self._mover.move(tensor, device)

        if isinstance(value, torch.Tensor):
            return move(value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        tree.learn(value)
        tensors = [leaf for leaf in tree.leaves(value) if isinstance(leaf, torch.Tensor)]
        if all(self._mover.device_of(tensor) == device for tensor in tensors):
            return value
        return tree.map_tensors(move, value)


def _with_values(slots: list[Slot]) -> Callable[..., None]:
    """A hook that writes a module's entries of a state dict anew, with the values that are elsewhere."""

    def write(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        absent = [slot for slot in slots if slot.absent]
        try:
            put(absent, [slot.computed() for slot in absent])
            if absent:  # a quantized layer has other names in a file than its buffers
                _torch.save_own(module, state, prefix)
        finally:
            for slot in absent:
                slot.put(slot.empty)

    return write


@contextlib.contextmanager
def _elsewhere(slots: list[Slot], device: Device, mover: Mover) -> Generator[None]:
    """Let modules see their values on a device, and then what they saw before."""
    for slot in slots:
        slot.check()
    before = [slot.registered for slot in slots]
    copies: dict[tuple[int, torch.dtype | None], torch.Tensor] = {}
    for slot in slots:
        key = id(slot.value), slot.dtype
        if key not in copies:
            copies[key] = mover.move(slot.computed(), device)
    put(slots, [copies[id(slot.value), slot.dtype] for slot in slots])
    try:
        yield
    finally:
        for slot, tensor in zip(slots, before, strict=True):
            if not slot.replaced:
                slot.put(tensor)


def _usable(device: object, mover: Mover) -> Device:
    """A device whose tensors can be used."""
    checked = check_device(device)
    require(
        checked != "disk",
        'device="disk"',
        "fetched",
        '"cpu", or an accelerator: an index (0)',
    )
    mover.check(checked)
    return checked


def _below(path: str, parent: str) -> bool:
    return not parent or path == parent or path.startswith(f"{parent}.")


def dispatch(
    model: nn.Module,
    placed: DeviceMap | Mapping[str, Device] | Device,
    *,
    folder: str | os.PathLike[str] | None = None,
    device: Device | None = None,
    prefetch: int = 1,
    offload_buffers: bool | None = None,
    preload: Iterable[str] | str = (),
    skip_keys: Iterable[str] | str = (),
    mover: Mover | None = None,
) -> Dispatch:
    """Place the layers of a module by a map, and have them fetched when they run.

    Layers on `"cpu"` and `"disk"` run on the first accelerator of the map, or on the CPU if it has none.
    Layers whose classes should not be split are fetched whole, and so are those of `preload`.

    Args:
        model: a module with values. It is changed in place.
        placed: a device map, a dict of paths and devices, or one device for all.
        folder: for layers on the disk. Not needed for files that `fa.big.load` uses in place.
        device: the device that runs layers on the CPU and on the disk, if not the first accelerator.
        prefetch: how many layers are fetched ahead. 0: each when it is needed.
        offload_buffers: fetch buffers too. If False, they stay on the device that runs their layer. By
            default as the map was made, and False for a dict.
        preload: classes whose modules are fetched whole, because their forward reads weights of inner modules
            without calling these.
        skip_keys: keyword arguments of layers that are not moved, such as a cache.
        mover: copies tensors. Tests inject one.

    Raises:
        ArgumentError: the map does not cover the model, a folder is missing or too small, a tensor has no
            values.
        CapabilityError: this machine lacks a device of the map.
        OwnershipError: the module is dispatched already.

    Example:
        >>> model = torch.nn.Linear(4, 2).requires_grad_(False)
        >>> run = fa.big.dispatch(model, {"": "cpu"})
        >>> run.map.devices
        ('cpu',)
    """
    whole = as_map(placed)
    options = Options(
        folder=optional_path(folder, "fa.big.dispatch"),
        device=device,
        prefetch=prefetch,
        offload_buffers=whole.offload_buffers if offload_buffers is None else offload_buffers,
        preload=preload,
        skip_keys=skip_keys,
        mover=mover or Mover(),
    )
    return dispatched(model, whole, {}, options)


def dispatched(
    model: nn.Module, placed: DeviceMap | Mapping[str, Device] | Device, values: Values, options: Options
) -> Dispatch:
    """`dispatch`, with values for parameters that have none.

    Args:
        model: as in `dispatch`.
        placed: as in `dispatch`.
        values: tensors by name that were found elsewhere, and whether they are in mapped files.
        options: the other arguments.
    """
    check_free(model)
    whole = as_map(placed)
    whole.check(model)
    units, moved = plan(model, whole, values, options)
    return Dispatch(model, whole, units, moved, options)


def check_free(model: nn.Module) -> None:
    """See that no module is dispatched already, and that hooks can be registered.

    Raises:
        OwnershipError: a module, or one inside of it, is dispatched.
        CapabilityError: one is compiled by TorchScript.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CapabilityError(
                f"{name or 'the model'} is compiled by TorchScript, which takes no hooks",
                where="fa.big.dispatch",
                fix="dispatch the module that torch.jit.script was given",
            )
        if _KEY in module.__dict__:
            raise OwnershipError(
                f"{name or 'the model'} is dispatched already",
                where="fa.big",
                fix="remove() its dispatch first: fa.big.dispatch_of(model).remove()",
            )


def dispatch_of(model: nn.Module) -> Dispatch | None:
    """The dispatch of a module, or None if it has none.

    Example:
        >>> print(fa.big.dispatch_of(torch.nn.Linear(4, 2)))
        None
    """
    return model.__dict__.get(_KEY)


@contextlib.contextmanager
def fetched(module: nn.Module, device: Device, *, mover: Mover | None = None) -> Generator[nn.Module]:
    """Have all values of a module on a device while the body runs, whether it is dispatched or not.

    What is written to a module that is not dispatched stays: the values go back to their own devices.

    Args:
        module: a module with values. For a part of a dispatched model: `run.fetched(path, device)`.
        device: an accelerator's index, `"cpu"`, or a device of torch by name.
        mover: copies tensors. Tests inject one.

    Raises:
        ArgumentError: a tensor has no values, or the device can hold no tensor that is used.
        CapabilityError: this machine lacks the device.

    Example:
        >>> with fa.big.fetched(torch.nn.Linear(4, 2), "cpu") as layer:
        ...     print(layer.weight.device)
        cpu
    """
    run = dispatch_of(module)
    if run is not None:
        with run.fetched(device=device):
            yield module
        return
    moves = mover or Mover()
    target = _usable(device, moves)
    tensors = list({id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}.values())
    if any(tensor.is_meta for tensor in tensors):
        raise ArgumentError(
            "a tensor of the module has no values",
            where="fa.big.fetched",
            fix="fa.big.load(model, path) reads them. In a dispatched model: run.fetched(path, device)",
        )
    before = [tensor.data for tensor in tensors]
    try:
        for tensor, own in zip(tensors, before, strict=True):
            tensor.data = moves.move(own, target)
        yield module
    finally:
        for tensor, own in zip(tensors, before, strict=True):
            if tensor.data_ptr() != own.data_ptr():
                own.copy_(moves.move(tensor.data, moves.device_of(own)))
                tensor.data = own
