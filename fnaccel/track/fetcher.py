"""`Fetcher`: metrics from the device to the host, without stalling a step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_Step = tuple[int, dict[str, float], list[str], torch.Tensor | None, Any]
"""Step, values on the host, names of the values on a device, their copy, and the event of its end."""


class Fetcher:
    """Copies scalar metrics to the host asynchronously, and returns those that have arrived.

    On the CPU everything has arrived at once. On an accelerator a copy is read when its event says
    that it is complete, or after `depth` steps.
    """

    def __init__(self, depth: int = 8) -> None:
        self._depth = depth
        self._waiting: deque[_Step] = deque()

    def put(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take one step's metrics. Values that are no scalars are left out.

        Numbers and tensors on the CPU keep their value to double precision, those on an accelerator to single
        precision.
        """
        values: dict[str, float] = {}
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1 or value.is_complex():
                    continue
                if value.device.type == "cpu":
                    values[name] = float(value.item())
                else:
                    values[name] = math.nan  # this keeps its place among the names
                    names.append(name)
                    device = tensors[0].device if tensors else value.device
                    tensors.append(value.detach().reshape(()).to(device, torch.float32))
            elif isinstance(value, int | float):
                values[name] = _as_float(value)
        if not values:
            return
        packed: torch.Tensor | None = None
        event: Any = None
        if tensors:
            device_values = torch.stack(tensors)
            packed = torch.empty_like(device_values, device="cpu", pin_memory=True)
            packed.copy_(device_values, non_blocking=True)
            event = torch.Event(device_values.device.type)
            event.record()
        self._waiting.append((step, values, names, packed, event))

    def arrived(self, *, wait: bool = False) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, metrics as floats) for the steps whose copies are complete. All steps if `wait`."""
        while self._waiting:
            step, values, names, packed, event = self._waiting[0]
            if event is not None and not event.query():
                if not wait and len(self._waiting) <= self._depth:
                    return
                event.synchronize()
            self._waiting.popleft()
            if packed is not None:
                values.update(zip(names, packed.tolist(), strict=True))
            yield step, values


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf if value > 0 else -math.inf
