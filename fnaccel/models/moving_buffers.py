"""Buffers that a forward changes (running statistics), so that a step that fails can put them back.

A block that remat runs twice puts them back too.

Constant buffers, such as masks, are not copied: only those that changed in an earlier step are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence

import torch
from torch import nn

from fnaccel import _torch
from fnaccel.world.undo import StreamStates


class MovingBuffers:
    """The buffers of some modules, and copies of those that move.

    Args:
        slots: pairs of a module and the name of one of its buffers.
    """

    def __init__(self, slots: Sequence[tuple[nn.Module, str]]) -> None:
        self._slots = [(_torch.buffers_of(module), name) for module, name in slots]
        # torch's batch norm writes to these without a new version
        self._known = {i for i, (_, name) in enumerate(self._slots) if name.startswith("running_")}
        self._moving = set(range(len(self._slots)))  # the first step shows which others do
        self._before: list[tuple[torch.Tensor | None, int]] = []
        self._copies: dict[int, torch.Tensor] = {}

    @property
    def moving(self) -> set[int]:
        """The slots whose buffers moved in an earlier step."""
        return self._known

    def tensor(self, slot: int) -> torch.Tensor | None:
        """The buffer of a slot at this moment: a forward may have put another in its place."""
        buffers, name = self._slots[slot]
        return buffers.get(name)

    def begin(self) -> dict[int, torch.Tensor]:
        """Note the buffers before a step, or another run. Returns copies of those that may move, by slot."""
        if not self._slots:
            return {}
        tensors = [buffers.get(name) for buffers, name in self._slots]
        self._before = [(x, -1 if x is None else _torch.version_of(x)) for x in tensors]
        self._copies = {i: x.detach().clone() for i in self._moving if (x := tensors[i]) is not None}
        return self._copies

    def end(self) -> None:
        """Learn from a step that succeeded which buffers move."""
        if not self._slots:
            return
        self._known.update(index for index in range(len(self._slots)) if self._changed(index))
        if len(self._moving) > len(self._known):
            self._known.update(index for index in self._copies if self._differs(index))
        self._moving = set(self._known)
        self._copies = {}

    @contextlib.contextmanager
    def holding(self, copies: Mapping[int, torch.Tensor]) -> Generator[None]:
        """In the body the slots of buffers that move hold copies, which take all changes.

        Args:
            copies: those of `begin`. A buffer that moved for the first time since then is copied now.
        """
        slots = [(*self._slots[slot], slot) for slot in self._known]
        held = [
            (buffers, name, x, slot) for buffers, name, slot in slots if (x := buffers.get(name)) is not None
        ]
        try:
            for buffers, name, tensor, slot in held:
                buffers[name] = copies[slot].clone() if slot in copies else tensor.detach().clone()
            yield
        finally:
            for buffers, name, tensor, _ in held:
                buffers[name] = tensor

    def put_back(self) -> bool:
        """Restore the buffers. False if one changed for the first time, so that no copy of it exists."""
        exact = True
        with torch.no_grad():
            for index, (tensor, _) in enumerate(self._before):
                buffers, name = self._slots[index]
                changed = self._changed(index)
                buffers[name] = tensor
                if index in self._copies and tensor is not None:
                    _give_back(tensor, self._copies[index])
                elif changed and tensor is not None:
                    exact = False
        self._copies = {}
        return exact

    def _changed(self, index: int) -> bool:
        """Whether a buffer was written to, or replaced, since `begin`."""
        tensor, version = self._before[index]
        buffers, name = self._slots[index]
        if buffers.get(name) is not tensor:
            return True
        return tensor is not None and _torch.version_of(tensor) != version

    def _differs(self, index: int) -> bool:
        """Whether the value of a buffer is another than before. XLA would compile a graph to tell."""
        tensor, copy = self._before[index][0], self._copies[index]
        return tensor is not None and tensor.device.type != "xla" and not torch.equal(tensor, copy)


def buffer_slots(root: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """The buffers of a model: the name of each as states show it, its module, and its name there."""
    persistent = dict(root.named_buffers())
    slots: list[tuple[str, nn.Module, str]] = []
    for prefix, module in root.named_modules():
        for attribute in _torch.buffers_of(module):
            name = f"{prefix}.{attribute}" if prefix else attribute
            if name in persistent:
                slots.append((name, module, attribute))
    return slots


@contextlib.contextmanager
def passes_put_back(roots: Iterable[nn.Module], streams: StreamStates) -> Generator[None]:
    """After passes beside those of an update, buffers and random streams are as before them.

    A buffer that a first forward registers goes again: its size may be that of these rows.
    """
    slots = [_torch.buffers_of(module) for root in roots for module in root.modules()]
    held = [(slot, dict(slot)) for slot in slots]
    copies = [(x, x.clone()) for _, named in held for x in named.values() if x is not None]
    try:
        yield
    finally:
        streams.put_back()
        for slot, named in held:
            slot.clear()
            slot.update(named)
        with torch.no_grad():
            for buffer, before in copies:
                _give_back(buffer, before)


def _give_back(buffer: torch.Tensor, before: torch.Tensor) -> None:
    """Fill a buffer with its value of before, also if a forward resized it."""
    (buffer if buffer.shape == before.shape else buffer.resize_(before.shape)).copy_(before)
