"""`Fetcher`: metrics from the device to the host, without stalling a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch


class Fetcher:
    """Copies scalar metrics to the host asynchronously, and returns those that have arrived.

    On the CPU everything has arrived at once. On an accelerator a copy is read when its event says
    that it is complete, or after `depth` steps.
    """

    def __init__(self, depth: int = 8) -> None:
        self._depth = depth
        # step, values (0.0 for those to come), the names of those to come, their copies, their event
        self._waiting: deque[tuple[int, dict[str, float], list[str], torch.Tensor | None, Any]] = deque()

    def put(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take one step's metrics. Values that are no scalars are left out."""
        values: dict[str, float] = {}
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    continue
                if value.device.type == "cpu":
                    values[name] = float(value.detach())
                else:
                    values[name] = 0.0
                    names.append(name)
                    tensors.append(value.detach().reshape(()))
            elif isinstance(value, int | float):
                values[name] = float(value)
        if not values:
            return
        host: torch.Tensor | None = None
        event: Any = None
        if tensors:
            device = tensors[0].device
            packed = torch.stack([tensor.to(device, torch.float32) for tensor in tensors])
            host = torch.empty_like(packed, device="cpu", pin_memory=True)
            host.copy_(packed, non_blocking=True)
            event = torch.Event(device.type)
            event.record()
        self._waiting.append((step, values, names, host, event))

    def arrived(self, *, wait: bool = False) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, metrics as floats) for the steps whose copies are complete. All steps if `wait`."""
        while self._waiting:
            step, values, names, host, event = self._waiting[0]
            if host is not None:
                if not event.query():
                    if not wait and len(self._waiting) <= self._depth:
                        return
                    event.synchronize()
                values.update(zip(names, host.tolist(), strict=True))
            self._waiting.popleft()
            yield step, values
