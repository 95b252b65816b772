"""`Fetcher`: metrics from the device to the host, without stalling a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from fnaccel.track.plain import leaves_of, number_of
from fnaccel.world.host_copy import HostCopy


@attrs.define
class Row:
    """The metrics of one step.

    Attributes:
        step: the step.
        values: floats, and what is no number as it was given. 0.0 for the numbers that have not arrived yet.
        options: what `put` was given for the trackers.
        coming: the names of the numbers that have not arrived yet.
        copies: of them.
    """

    step: int
    values: dict[str, Any]
    options: Any = None
    coming: tuple[str, ...] = ()
    copies: HostCopy | None = None


class Fetcher:
    """Copies scalar metrics to the host asynchronously, and returns those that have arrived.

    On the CPU everything has arrived at once. On an accelerator a copy is read when its event says
    that it is complete, or after `depth` steps.
    """

    def __init__(self, depth: int = 8) -> None:
        self._depth = depth
        self._waiting: deque[Row] = deque()

    def put(self, step: int, metrics: Mapping[str, Any], options: Any = None) -> dict[str, str]:
        """Take one step's metrics. The values of a nested mapping get names such as `eval/loss`.

        Returns:
            the names that were left out, and the reason: a tensor has several elements or is complex, or a
            nested mapping has the name of another metric.
        """
        values: dict[str, Any] = {}
        left_out: dict[str, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, value in leaves_of(metrics):
            if name in values:
                left_out[name] = "another metric has this name"
            elif not isinstance(value, torch.Tensor):
                number = None if isinstance(value, str) else number_of(value)
                values[name] = value if number is None else number
            elif value.numel() != 1 or value.is_complex():
                left_out[name] = f"it is a tensor of shape {tuple(value.shape)} in {value.dtype}"
            elif value.device.type == "cpu":
                values[name] = float(value.detach())
            else:
                values[name] = 0.0
                tensors[name] = value.detach().reshape(())
        if values:
            self._waiting.append(_row(step, values, options, tensors))
        return left_out

    def arrived(self, *, wait: bool = False) -> Iterator[Row]:
        """The rows whose copies are complete, in order. All rows if `wait`."""
        while self._waiting:
            row = self._waiting[0]
            if row.copies is not None:
                if not wait and len(self._waiting) <= self._depth and not row.copies.arrived:
                    return
                row.values.update(zip(row.coming, row.copies.read().tolist(), strict=True))
            self._waiting.popleft()
            yield row


def _row(step: int, values: dict[str, Any], options: Any, tensors: Mapping[str, torch.Tensor]) -> Row:
    if not tensors:
        return Row(step, values, options)
    device = next(iter(tensors.values())).device
    packed = torch.stack([tensor.to(device, torch.float32) for tensor in tensors.values()])
    return Row(step, values, options, tuple(tensors), HostCopy(packed))
