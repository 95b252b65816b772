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
        self._waiting: deque[tuple[int, list[str], torch.Tensor, Any]] = deque()

    def put(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take one step's metrics. Values that are no scalars are left out."""
        names: list[str] = []
        values: list[torch.Tensor] = []
        device = next(
            (v.device for v in metrics.values() if isinstance(v, torch.Tensor)), torch.device("cpu")
        )
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor):
                if value.numel() == 1:
                    names.append(name)
                    values.append(value.detach().reshape(()).to(device, torch.float32))
            elif isinstance(value, int | float):
                names.append(name)
                values.append(torch.tensor(float(value), device=device))
        if not values:
            return
        packed = torch.stack(values)
        event: Any = None
        if device.type != "cpu":
            host = torch.empty_like(packed, device="cpu", pin_memory=True)
            host.copy_(packed, non_blocking=True)
            event = torch.Event(device.type)
            event.record()
            packed = host
        self._waiting.append((step, names, packed, event))

    def arrived(self, *, wait: bool = False) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, metrics as floats) for the steps whose copies are complete. All steps if `wait`."""
        while self._waiting:
            step, names, packed, event = self._waiting[0]
            if event is not None and not event.query():
                if not wait and len(self._waiting) <= self._depth:
                    return
                event.synchronize()
            self._waiting.popleft()
            yield step, dict(zip(names, packed.tolist(), strict=True))
