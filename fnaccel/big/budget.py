"""How many bytes each device may hold: given by the user, or read from the machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fnaccel.errors import ArgumentError, require
from fnaccel.texts import bytes_in

Device = int | str
"""An accelerator's index, `"cpu"`, or `"disk"`. Also a device of torch by name: `"cuda:1"`."""

Budget = Mapping[Device, int | str]
"""Bytes by device, as numbers or as text: `{0: "10GiB", "cpu": "30GB"}`."""

_KEPT = 0.1
_LEAST_KEPT = 1 << 30


def read_budget(budget: Budget) -> dict[Device, int | None]:
    """A budget in bytes: accelerators in their given order, then the CPU, then the disk, which has no bound.

    Raises:
        ArgumentError: no device is named, or a device or its bytes can't be read.
    """
    require(
        isinstance(budget, Mapping),
        f"a budget of {budget!r}",
        "budget=",
        'write {0: "10GiB", "cpu": "30GiB"}',
    )
    sizes = {check_device(device): bytes_in(size, f"budget= of {device}") for device, size in budget.items()}
    if not sizes.keys() - {"disk"}:
        raise ArgumentError(
            "the budget names no device that can run a layer",
            where="budget=",
            fix='name an accelerator or the CPU: {0: "10GiB", "cpu": "30GiB"}',
        )
    ordered: dict[Device, int | None] = {d: size for d, size in sizes.items() if d not in ("cpu", "disk")}
    if "cpu" in sizes:
        ordered["cpu"] = sizes["cpu"]
    ordered["disk"] = sizes.get("disk")
    return ordered


def check_device(device: object) -> Device:
    """A device as it stands in a map.

    Raises:
        ArgumentError: it is none.
    """
    if isinstance(device, torch.device):
        device = "cpu" if device.type == "cpu" else str(device)
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    if isinstance(device, str) and (device == "disk" or _is_of_torch(device)):
        return device
    raise ArgumentError(
        f"{device!r} is no device",
        where="a device map or a budget",
        fix='an index (0), "cpu", "disk" or "cuda:1"',
    )


def _is_of_torch(name: str) -> bool:
    try:
        return torch.device(name).type != "meta"
    except RuntimeError:
        return False


def detected_budget(accelerator: Any = None, available: int | None = None) -> tuple[dict[Device, int], str]:
    """The budget that this machine has now, and a sentence that says how much was kept back.

    A tenth of each device is kept for activations and for the libraries' own memory, on accelerators at
    least 1 GiB.

    Args:
        accelerator: in the place of `torch.accelerator`, with `device_count()` and `get_memory_info(index)`.
        available: bytes of memory that the host has free. By default as psutil reads it.
    """
    import psutil  # noqa: PLC0415 - only if a budget is read from the machine

    free_bytes: dict[Device, int] = {}
    api: Any = torch.accelerator if accelerator is None else accelerator
    for index in range(api.device_count()):
        free, _ = api.get_memory_info(index)
        free_bytes[index] = max(0, free - max(int(free * _KEPT), _LEAST_KEPT))
    host = psutil.virtual_memory().available if available is None else available
    free_bytes["cpu"] = int(host * (1 - _KEPT))
    sentence = "10 % of the free memory of each device are kept back"
    return free_bytes, sentence + (", on accelerators at least 1 GiB" if len(free_bytes) > 1 else "")
