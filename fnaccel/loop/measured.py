"""Throughput and memory of each step, added to its metrics on the host."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from fnaccel.data import Batch, Window
from fnaccel.program.train_step import TrainStep
from fnaccel.seeing.memory import Peaks
from fnaccel.seeing.throughput import Meter, Throughput
from fnaccel.state import Position, TrainState


class Measures(AbstractContextManager["Measures"]):
    """In the body, the measurements of the steps of a loop.

    Args:
        train_step: whose steps.
        throughput: its options, or None.
        memory: whether to measure the peaks of memory.
    """

    def __init__(self, train_step: TrainStep, throughput: Throughput | None, *, memory: bool) -> None:
        device = train_step.mesh.world.device
        self._train_step = train_step
        self._what = throughput
        self._meter = None if throughput is None else Meter(throughput.window)
        self._peaks = Peaks(device) if memory else None
        self._ranks = train_step.mesh.batch_size
        self._peak = None if throughput is None else throughput.peak_of(device, low=train_step.low_precision)
        self._flops = None if throughput is None else throughput.flops
        self._stack = ExitStack()

    def __enter__(self) -> Measures:
        for context in (self._meter, self._peaks):
            if context is not None:
                self._stack.enter_context(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def before(self, state: TrainState, batch: Batch | Window) -> None:
        """Count the operations of a row before the first step, if anything is to be compared with them."""
        if self._peak is not None and self._flops is None:
            self._flops = self._train_step.flops(state, batch)

    def add(self, batch: Batch | Window, before: Position, after: Position, metrics: dict[str, Any]) -> None:
        """Add the measurements of a step to its metrics."""
        if self._peaks is not None:
            metrics.update(self._peaks.taken())
        if self._meter is None or self._what is None:
            return
        # the position counts the rows of all ranks, up to the end of an epoch
        rows = after.samples - before.samples
        if after.epoch != before.epoch:
            rows = sum(micro.valid for micro in _micros(batch)) * self._ranks
        count, tokens = self._what.tokens, 0
        if count is not None:
            tokens = sum(count(micro.data) for micro in _micros(batch) if micro.valid)
        rate, token_rate, waited = self._meter.ended(rows, tokens * self._ranks)
        metrics["rows_per_second"], metrics["data_wait"] = rate, waited
        if count is not None:
            metrics["tokens_per_second"] = token_rate
        if self._peak is not None and self._flops is not None:
            metrics["mfu"] = rate / self._ranks * self._flops / self._peak


def _micros(batch: Batch | Window) -> tuple[Batch, ...]:
    return tuple(batch) if isinstance(batch, Window) else (batch,)
