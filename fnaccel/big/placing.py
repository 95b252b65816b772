"""Where layers go: in order, device after device, then into gaps. Arithmetic on sizes, without a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, get_args

import attrs

from fnaccel.big.budget import Device

Strategy = Literal["auto", "balanced", "balanced_low_0", "sequential"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)

_MOST_SUMS = 256
"""Sums that a search for the fullest gap keeps: more would take seconds for thousands of layers."""


@attrs.frozen
class Part:
    """Layers that go to one device together.

    Attributes:
        size: bytes on an accelerator.
        fetch: bytes that the run device needs at one time, if the layers are offloaded: the largest of them.
        buffers: bytes that stay on the run device, if the layers are offloaded.
        run_only: whether no other accelerator than the run device may hold it.
    """

    size: int
    fetch: int
    buffers: int = 0
    run_only: bool = False


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


def fill(parts: Sequence[Part], rooms: Sequence[Room]) -> list[Device] | None:
    """The device of each part. A device that was left is not used again. None if a part is left over.

    Args:
        parts: in the order of the model.
        rooms: in the order in which they are filled.
    """
    largest_after = [0] * len(parts)
    for index in range(len(parts) - 2, -1, -1):
        largest_after[index] = max(largest_after[index + 1], parts[index + 1].fetch)
    devices: list[Device] = []
    at, used = 0, 0
    for part, largest in zip(parts, largest_after, strict=True):
        while at < len(rooms) and not _holds(rooms[at], used + part.size, largest):
            at, used = at + 1, 0
        if at == len(rooms) or (at and part.run_only):
            return None
        devices.append(rooms[at].device)
        used += part.size
    return devices


def _holds(room: Room, used: int, largest: int) -> bool:
    if room.limit is not None and used > room.limit:
        return False
    return room.budget is None or used + largest <= room.budget


def place(
    parts: Sequence[Part], budget: Sequence[tuple[Device, int | None]], strategy: Strategy
) -> list[Device] | None:
    """The device of each part, by a strategy. None if a part is left over.

    Args:
        parts: in the order of the model.
        budget: bytes by device: accelerators first, then the CPU, then the disk.
        strategy: see `fa.big.device_map`.
    """
    fast = [(device, limit) for device, limit in budget if device not in ("cpu", "disk")]
    for keep_room in (True, False):  # all on accelerators is better than a layer that is offloaded
        devices = _on_accelerators(parts, fast, strategy, keep_room)
        if devices is not None:
            return devices
    near, far = budget[: len(fast) or 1], budget[len(fast) or 1 :]
    reserved = 0
    while True:  # buffers that stay take room, and then more layers are offloaded
        devices = _offloading(parts, near, far, reserved)
        away = [device for device, _ in far]
        if devices is None or staying_buffers(parts, devices, away) <= reserved:
            return devices
        if not buffers_fit(parts, devices, away, near[0][1]):
            return _offloading(parts, near, far, 0)
        reserved = staying_buffers(parts, devices, away)


def staying_buffers(parts: Sequence[Part], devices: Sequence[Device], far: Collection[Device]) -> int:
    """Bytes on the run device of buffers whose layers are on one of the devices `far`."""
    return sum(part.buffers for part, device in zip(parts, devices, strict=True) if device in far)


def buffers_fit(
    parts: Sequence[Part],
    devices: Sequence[Device],
    far: Collection[Device],
    limit: int | None,
    held: int = 0,
) -> bool:
    """Whether the run device can hold the buffers that stay there, the largest fetch, and `held` bytes."""
    fetched = [part.fetch for part, device in zip(parts, devices, strict=True) if device in far]
    staying = staying_buffers(parts, devices, far)
    return not staying or limit is None or held + staying + max(fetched) <= limit


def _offloading(
    parts: Sequence[Part],
    near: Sequence[tuple[Device, int | None]],
    far: Sequence[tuple[Device, int | None]],
    reserved: int,
) -> list[Device] | None:
    """The device of each part, if they do not all fit on the devices that run layers.

    Args:
        parts: in the order of the model.
        near: the devices that run layers, with their bytes. The first also runs offloaded layers.
        far: the other devices: the CPU, the disk.
        reserved: bytes of the run device that layers do not get.
    """
    limits = [_bound(limit, parts) for _, limit in near]
    limits[0] -= reserved
    chosen = max(
        (_near(parts, limits, ahead) for ahead in ("", "first", "all")), key=lambda at: _total(parts, at)
    )
    devices: dict[int, Device] = {part: near[at][0] for part, at in chosen.items()}
    sizes = {index: part.size - part.buffers for index, part in enumerate(parts) if index not in chosen}
    for device, limit in far:
        room, held = _bound(limit, parts), list[int]()
        for index, size in sizes.items():
            if size > room:
                break
            held.append(index)
            room -= size
        held += fullest({index: size for index, size in sizes.items() if index not in held}, room)
        for index in held:
            devices[index] = device
            sizes.pop(index)
    return None if sizes else [devices[index] for index in range(len(parts))]


def _bound(limit: int | None, parts: Sequence[Part]) -> int:
    return sum(part.size for part in parts) if limit is None else limit


def _total(parts: Sequence[Part], placed: Mapping[int, int]) -> int:
    return sum(parts[index].size for index in placed)


def _near(parts: Sequence[Part], limits: Sequence[int], ahead: Literal["", "first", "all"]) -> dict[int, int]:
    """The devices of the parts that are not offloaded, by index.

    First in the order of the model, device after device. Then the gaps are filled with parts that would be
    offloaded.

    Args:
        parts: in the order of the model.
        limits: bytes of each device.
        ahead: what an empty device takes before the next one is filled, if the next part is too large for it:
            nothing, the first later part that fits, or as much as fits. Each can hold the most in the end.
    """
    placed: dict[int, int] = {}
    room = list(limits)

    def put(index: int, at: int) -> None:
        placed[index] = at
        room[at] -= parts[index].size

    def gap(at: int) -> list[int]:
        others = {index: part for index, part in enumerate(parts) if index not in placed}
        if at == 0:
            return _beside_the_largest(others, room[0])
        return fullest({i: part.size for i, part in others.items() if not part.run_only}, room[at])

    def holds(index: int, at: int) -> bool:
        if at and parts[index].run_only:
            return False
        others = (part.fetch for i, part in enumerate(parts) if i != index and i not in placed)
        return parts[index].size + (0 if at else max(others, default=0)) <= room[at]

    at = 0
    for index, part in enumerate(parts):
        if index in placed or (at and part.run_only):
            continue
        while at < len(limits) and not holds(index, at):
            if ahead and room[at] == limits[at]:
                later = [i for i in range(index, len(parts)) if i not in placed and holds(i, at)][:1]
                for other in later if ahead == "first" else gap(at):
                    put(other, at)
            at += 1
        if at == len(limits):
            break
        put(index, at)
    found = True
    while found:  # a part that went to a later device may have left room on the first
        found = False
        for at in range(len(limits)):
            for other in gap(at):
                found = True
                put(other, at)
    return placed


def _beside_the_largest(parts: Mapping[int, Part], room: int) -> list[int]:
    """The parts that fill a gap of the run device, with room for the largest fetch of the others."""
    best: list[int] = []
    for largest in sorted({0, *(part.fetch for part in parts.values())}, reverse=True):
        larger = [index for index, part in parts.items() if part.fetch > largest]
        left = room - largest - sum(parts[index].size for index in larger)
        if left < 0:
            break
        smaller = {index: part.size for index, part in parts.items() if part.fetch <= largest}
        best = max(best, larger + fullest(smaller, left), key=lambda held: sum(parts[i].size for i in held))
    return best


def fullest(sizes: Mapping[int, int], room: int) -> list[int]:
    """The keys whose sizes have the largest sum within `room`. If several have, one with larger sizes.

    The search keeps the largest sums if there are too many.
    """
    sums: dict[int, Any] = {0: None}  # each to its last key, and the keys before it
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        for total in list(sums):
            if total + sizes[key] <= room and total + sizes[key] not in sums:
                sums[total + sizes[key]] = key, sums[total]
        if len(sums) > _MOST_SUMS:
            sums = {total: sums[total] for total in sorted(sums)[-_MOST_SUMS:]}
    keys: list[int] = []
    last = sums[max(sums)]
    while last is not None:
        keys.append(last[0])
        last = last[1]
    return sorted(keys)


def _on_accelerators(
    parts: Sequence[Part], fast: Sequence[tuple[Device, int | None]], strategy: Strategy, keep_room: bool
) -> list[Device] | None:
    if not fast:
        return None
    total = sum(part.size for part in parts)
    whole = [limit if limit is not None else total for _, limit in fast]

    def rooms(first: int, others: int) -> list[Room]:
        limits = [min(whole[0], first), *(min(limit, others) for limit in whole[1:])]
        return [
            Room(device, limit, whole[0] if keep_room and at == 0 else None)
            for at, ((device, _), limit) in enumerate(zip(fast, limits, strict=True))
        ]

    most = max(whole)
    if strategy == "auto" and total <= whole[0]:
        return [fast[0][0]] * len(parts)
    if strategy == "sequential" or len(fast) == 1:
        return fill(parts, rooms(most, most))
    if strategy == "balanced_low_0":
        return _least(parts, lambda cap: rooms(0, cap), most) or _least(
            parts, lambda cap: rooms(cap, most), most
        )
    return _least(parts, lambda cap: rooms(cap, cap), most)


def _least(parts: Sequence[Part], rooms: Callable[[int], list[Room]], most: int) -> list[Device] | None:
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
