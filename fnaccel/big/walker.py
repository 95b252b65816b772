"""Fetches layers in the order in which the model calls them, the next ones while one computes."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import attrs
import torch

from fnaccel.big.mapped_pages import read_ahead
from fnaccel.big.mover import Mover
from fnaccel.big.unit import Fetched, SharedCopy, Slot, Unit, put
from fnaccel.errors import CapabilityError


@attrs.define
class Counts:
    """The fetches of a dispatched model so far.

    Attributes:
        fetched: layers that were brought to their device.
        nbytes: bytes of these.
        ahead: how many of them were fetched before they were needed.
        out_of_order: layers that came after another one than the last time.
        reentered: layers that were called while they were running, or while `fetched` held them.
        most: the largest number of layers on their devices, or on the way there, at one time.
    """

    fetched: int = 0
    nbytes: int = 0
    ahead: int = 0
    out_of_order: int = 0
    reentered: int = 0
    most: int = 0


class Walker:
    """Brings units to their devices and takes them away.

    Each unit notes which one came after it. So the order is known from the second pass on, whatever calls the
    model: its own forward, a part of it (an encoder), or a loop that generates tokens.

    Args:
        mover: copies the tensors.
        prefetch: how many units are fetched ahead.
    """

    def __init__(self, mover: Mover, prefetch: int) -> None:
        self.counts = Counts()
        self._mover = mover
        self._prefetch = prefetch
        self._last: Unit | None = None
        self._stays: Unit | None = None  # it was called twice in a row the last time
        self._ahead: list[Unit] = []
        self._held: set[int] = set()
        # alive as long as a unit holds them
        self._copies: weakref.WeakValueDictionary[tuple[object, ...], SharedCopy] = (
            weakref.WeakValueDictionary()
        )
        self._process = 0
        self._begin_process()

    def _begin_process(self, unit: Unit | None = None) -> None:
        """Make a thread. A fork has neither that of its parent nor what this one was fetching."""
        if self._process == os.getpid():
            return
        for other in [*self._ahead, *([] if unit is None else [unit])]:
            other.pending = None
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, "fnaccel fetch") if self._prefetch else None
        self._lock = threading.RLock()  # the model may run in several threads

    def enter(self, unit: Unit) -> None:
        """Bring a unit to its device, before its forward pass.

        Raises:
            CapabilityError: gradients are asked for.
        """
        if torch.is_grad_enabled() and unit.trained:
            raise CapabilityError(
                f"{unit.path or 'the model'} is offloaded, and gradients would need it once more",
                where="a dispatched model",
                fix="with torch.inference_mode(): ..., or train with fa.fsdp(offload=True)",
            )
        self._begin_process(unit)
        with self._lock:
            unit.depth += 1
            if unit.depth > 1:
                self.counts.reentered += 1
                return
            stays, self._stays = self._stays, None
            if stays is not None and stays is not unit and stays.depth == 0:
                self.release(stays)
            self._note(unit)
            self.counts.ahead += unit.pending is not None
            self._fetch_ahead(unit)
            if not unit.here:
                self._bring(unit)

    def leave(self, unit: Unit, *, keep: bool = False) -> None:
        """Take a unit away after its forward pass, unless it comes next again or is kept."""
        with self._lock:
            unit.depth = max(0, unit.depth - 1)  # it did not rise if `enter` raised
            if unit.depth or keep:
                return
            if unit.after is unit:
                self._stays = unit
            else:
                self.release(unit)

    def release(self, unit: Unit) -> None:
        """Take a unit away."""
        unit.depth, unit.here = 0, False
        unit.copies = []
        self._held.discard(id(unit))
        for slot in unit.slots:
            slot.release()

    def bring(self, unit: Unit) -> None:
        """Bring a unit to its device, whatever comes next. It stays until `leave`."""
        self._begin_process(unit)
        with self._lock:
            unit.depth += 1
            if not unit.here:
                self._bring(unit)

    def drop(self) -> None:
        """Let go of the units that were fetched ahead and not used."""
        self._begin_process()
        for unit in self._ahead:
            self._forget(unit)
        self._ahead, self._last = [], None
        if self._thread is not None:
            self._thread.submit(int).result()  # the thread, too, has let go of what it fetched

    def close(self) -> None:
        """End the thread."""
        self.drop()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _note(self, unit: Unit) -> None:
        """Learn which unit comes after the last one."""
        if self._last is not None and self._last.after is not unit:
            self.counts.out_of_order += self._last.after is not None
            self._last.after = unit
        self._last = unit

    def _fetch_ahead(self, unit: Unit) -> None:
        """Begin to fetch the next units, and forget those that were fetched for nothing."""
        coming = list(self._following(unit))
        for other in self._ahead:
            if other is not unit and other not in coming:
                self._forget(other)
        self._ahead = [other for other in coming if not other.here]
        self._held.add(id(unit))
        self._held |= {id(other) for other in self._ahead}
        self.counts.most = max(self.counts.most, len(self._held))
        if self._thread is None:
            return
        current = [unit] if not unit.here else []  # it comes first if it was not fetched ahead
        for other in [*current, *self._ahead]:
            if other.pending is None:
                other.pending = self._thread.submit(self._begin, other)

    def _following(self, unit: Unit) -> Iterator[Unit]:
        seen, other = {id(unit)}, unit.after
        while other is not None and id(other) not in seen and len(seen) <= self._prefetch:
            yield other
            seen.add(id(other))
            other = other.after

    def _forget(self, unit: Unit) -> None:
        if unit.pending is not None:
            unit.pending.cancel()
            unit.pending = None
        if not unit.here:
            self._held.discard(id(unit))
            for slot in unit.slots:
                slot.release()

    def _begin(self, unit: Unit) -> Fetched:
        """Read the pages that are used in place, and begin to copy other tensors."""
        for slot in unit.slots:
            if slot.in_place:
                read_ahead(slot.value)
        copied = [slot for slot in unit.slots if not slot.in_place]
        own = self._mover.fetch([slot.computed() for slot in copied if not slot.shared], unit.device)
        shared = {id(slot): self._shared_copy(slot, unit) for slot in copied if slot.shared}

        def hand_over() -> list[torch.Tensor]:
            unit.copies = list(shared.values())
            values = iter(own())
            return [shared[id(slot)].fetched()[0] if id(slot) in shared else next(values) for slot in copied]

        return hand_over

    def _shared_copy(self, slot: Slot, unit: Unit) -> SharedCopy:
        """The copy of a tied tensor that another unit has now, or else one that is begun."""
        key = id(slot.value), slot.dtype, unit.device
        copy = self._copies.get(key)
        if copy is None:
            copy = SharedCopy(self._mover.fetch([slot.computed()], unit.device))
            self._copies[key] = copy
        return copy

    def _bring(self, unit: Unit) -> None:
        for slot in unit.slots:
            slot.check()
        copied = [slot for slot in unit.slots if not slot.in_place]
        pending, unit.pending = unit.pending, None
        if copied:
            fetched = pending.result() if pending is not None else self._begin(unit)
            put(copied, fetched())
        self.counts.fetched += 1
        self.counts.nbytes += unit.nbytes
        unit.here = True
