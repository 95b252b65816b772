"""Where layers go: in order, device after device. Arithmetic on sizes, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import attrs

from fnaccel.big.budget import Device

Strategy = Literal["auto", "balanced", "balanced_low_0", "sequential"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)


@attrs.frozen
class Room:
    """A device with room for layers.

    Attributes:
        device: its name.
        limit: bytes that it may hold. None: no bound.
        budget: bytes that it may hold together with the largest layer that is still to be placed. None: it
            keeps no room for one.
    """

    device: Device
    limit: int | None
    budget: int | None = None


def fill(parts: Sequence[int], rooms: Sequence[Room]) -> list[Device] | None:
    """The device of each part. A device that was left is not used again. None if a part is left over.

    Args:
        parts: bytes of each, in the order of the model.
        rooms: in the order in which they are filled.
    """
    largest_after = [0] * len(parts)
    for index in range(len(parts) - 2, -1, -1):
        largest_after[index] = max(largest_after[index + 1], parts[index + 1])
    devices: list[Device] = []
    at, used = 0, 0
    for size, largest in zip(parts, largest_after, strict=True):
        while at < len(rooms) and not _holds(rooms[at], used + size, largest):
            at, used = at + 1, 0
        if at == len(rooms):
            return None
        devices.append(rooms[at].device)
        used += size
    return devices


def _holds(room: Room, used: int, largest: int) -> bool:
    if room.limit is not None and used > room.limit:
        return False
    return room.budget is None or used + largest <= room.budget


def place(
    parts: Sequence[int], budget: Sequence[tuple[Device, int | None]], strategy: Strategy
) -> list[Device] | None:
    """The device of each part, by a strategy. None if a part is left over.

    Args:
        parts: bytes of each, in the order of the model.
        budget: bytes by device: accelerators first, then the CPU, then the disk.
        strategy: see `fa.big.device_map`.
    """
    fast = [(device, limit) for device, limit in budget if device not in ("cpu", "disk")]
    for keep_room in (True, False):  # all on accelerators is better than a layer that is offloaded
        devices = _on_accelerators(parts, fast, strategy, keep_room)
        if devices is not None:
            return devices
    rooms = [Room(device, limit, limit if not at else None) for at, (device, limit) in enumerate(budget)]
    return fill(parts, rooms)


def _on_accelerators(
    parts: Sequence[int], fast: Sequence[tuple[Device, int | None]], strategy: Strategy, keep_room: bool
) -> list[Device] | None:
    if not fast:
        return None
    whole = [limit if limit is not None else sum(parts) for _, limit in fast]

    def rooms(first: int, others: int) -> list[Room]:
        limits = [min(whole[0], first), *(min(limit, others) for limit in whole[1:])]
        return [
            Room(device, limit, whole[0] if keep_room and at == 0 else None)
            for at, ((device, _), limit) in enumerate(zip(fast, limits, strict=True))
        ]

    most = max(whole)
    if strategy == "auto" and sum(parts) <= whole[0]:
        return [fast[0][0]] * len(parts)
    if strategy == "sequential" or len(fast) == 1:
        return fill(parts, rooms(most, most))
    if strategy == "balanced_low_0":
        return _least(parts, lambda cap: rooms(0, cap), most) or _least(
            parts, lambda cap: rooms(cap, most), most
        )
    return _least(parts, lambda cap: rooms(cap, cap), most)


def _least(parts: Sequence[int], rooms: Callable[[int], list[Room]], most: int) -> list[Device] | None:
    """The placement under the smallest limit that holds all parts."""
    best = fill(parts, rooms(most))
    if best is None:
        return None
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        devices = fill(parts, rooms(middle))
        if devices is None:
            low = middle + 1
        else:
            best, high = devices, middle
    return best
