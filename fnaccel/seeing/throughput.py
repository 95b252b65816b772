"""Throughput: rows and tokens a second, the share of waiting for data, and use of the device's peak."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import attrs
import torch

from fnaccel.errors import require
from fnaccel.world.progress_marks import Mark, listening

_TERA = 1e12
PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10G": 70.0,
    "V100": 125.0,
    "T4": 65.0,
    "MI325X": 1307.0,
    "MI300X": 1307.0,
    "MI250X": 191.5,
}
"""Dense 16-bit peaks in TFLOP/s by a part of the device's name, from data sheets (MI250X: one die)."""


@attrs.frozen(kw_only=True)
class Throughput:
    """The options of `fa.Watch(throughput=)`. `True` stands for the defaults.

    Attributes:
        tokens: the number of tokens in a batch of this rank, for `tokens_per_second`. Called with the batch.
        flops: floating-point operations of a row, forward and backward, for `mfu`. None counts those of the
            first row if the peak is known: one more forward of one row before the first step.
        peak: of a rank's device, in TFLOP/s for the dtype of the step. None looks it up by the device's name,
            for 16-bit precision.
        window: over how many steps.

    Raises:
        ArgumentError: a number that is not positive, or `tokens` that can't be called.

    Example:
        >>> watch = fa.Watch(throughput=fa.seeing.Throughput(tokens=lambda batch: batch["tokens"].numel()))
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), watch=watch):
        ...     pass
        >>> sorted(name for name in metrics if name not in ("loss", "lr", "weight"))
        ['data_wait', 'rows_per_second', 'tokens_per_second']
    """

    tokens: Callable[[Any], int] | None = None
    flops: float | None = None
    peak: float | None = None
    window: int = 50

    def __attrs_post_init__(self) -> None:
        for name in ("flops", "peak", "window"):
            value = getattr(self, name)
            kind = int if name == "window" else int | float
            positive = value is None or (isinstance(value, kind) and value > 0)
            require(positive, f"{name}={value!r}", "Throughput", f"{name} is more than 0")
        require(
            self.tokens is None or callable(self.tokens),
            f"tokens={self.tokens!r}",
            "Throughput",
            'a function of the batch: tokens=lambda batch: batch["tokens"].numel()',
        )

    def peak_of(self, device: torch.device, *, low: bool) -> float | None:
        """The peak of a device in FLOP/s, or None if it is not known.

        Args:
            device: the compute device.
            low: whether the step computes in 16 bits.
        """
        if self.peak is not None:
            return self.peak * _TERA
        if device.type != "cuda" or not low:
            return None
        name = torch.cuda.get_device_name(device)
        return next((peak * _TERA for part, peak in PEAKS.items() if part in name), None)


class Meter(AbstractContextManager["Meter"]):
    """In the body, the throughput of the newest steps. The clock is the host's: nothing waits for a device.

    Args:
        window: over how many steps.
    """

    def __init__(self, window: int) -> None:
        # (time, rows, tokens, seconds of waiting) since the beginning, at the end of each step
        self._ends: deque[tuple[float, int, int, float]] = deque(maxlen=window)
        self._rows = self._tokens = 0
        self._waited = self._since = 0.0
        self._started = False
        self._listening = listening(self._enter)

    def __enter__(self) -> Meter:
        self._listening.__enter__()
        self._ends.append((time.perf_counter(), 0, 0, 0.0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.__exit__(kind, error, trace)

    def _enter(self, mark: Mark) -> None:
        if mark.phase == "data":
            self._since = time.perf_counter()
        elif self._since:
            self._waited += time.perf_counter() - self._since
            self._since = 0.0

    def ended(self, rows: int, tokens: int = 0) -> tuple[float, float, float]:
        """End a step of so many rows and tokens.

        Returns:
            Rows a second, tokens a second, and the share of waiting for data from 0 to 1.
        """
        self._rows += rows
        self._tokens += tokens
        now = time.perf_counter(), self._rows, self._tokens, self._waited
        first = self._ends[0]
        if not self._started:  # the first step compiles, and is no part of the window
            self._started = True
            self._ends.clear()
        self._ends.append(now)
        per_second = 1.0 / max(now[0] - first[0], 1e-9)
        return (
            (now[1] - first[1]) * per_second,
            (now[2] - first[2]) * per_second,
            (now[3] - first[3]) * per_second,
        )
