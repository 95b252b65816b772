"""`Watch`: throughput and memory of each step, added to its metrics on the host, profiles, garbage."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, ExitStack, closing
from types import TracebackType
from typing import Any

import attrs

from fnaccel.checkpoint.disk.garbage import no_collection
from fnaccel.data import Batch, Window
from fnaccel.errors import require, require_counts
from fnaccel.loop.evaluating import Steps
from fnaccel.program.train_step import TrainStep
from fnaccel.seeing.memory import Peaks
from fnaccel.seeing.profile import Profile, profile
from fnaccel.seeing.throughput import Meter, Throughput
from fnaccel.state import Position, TrainState


@attrs.frozen(kw_only=True)
class Watch:
    """What `fa.scan(watch=)` records beside the metrics of the loss.

    Attributes:
        profile: record some steps on every rank, by `fa.profile`. A path: with its defaults.
        throughput: add `rows_per_second` and `data_wait` (from 0 to 1) to the metrics, with
            `fa.seeing.Throughput` also `tokens_per_second` and `mfu`. Nothing waits for it.
        gc_every: run the garbage collector after each such step, on all ranks after the same ones, and not
            between: ranks that collect at different times wait for each other. None: whenever Python would.
        memory: add the peak of memory in MiB, `peak_mib`, and that of each phase, such as
            `peak_mib/forward`. On the CPU it costs about 0.5 ms a step.

    Raises:
        ArgumentError: an option of another type.

    Example:
        >>> watch = fa.Watch(throughput=True, memory=True)
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), watch=watch):
        ...     pass
        >>> sorted(metrics)[:3]
        ['data_wait', 'loss', 'lr']
    """

    profile: Profile | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(lambda it: it if isinstance(it, Profile) else profile(it)),
    )
    throughput: Throughput | None = attrs.field(
        default=None, converter=lambda it: (Throughput() if it else None) if isinstance(it, bool) else it
    )
    memory: bool = False
    gc_every: int | None = None

    def __attrs_post_init__(self) -> None:
        require_counts("fa.Watch", gc_every=self.gc_every)
        require(
            self.throughput is None or isinstance(self.throughput, Throughput),
            f"throughput={self.throughput!r}",
            "fa.Watch",
            "throughput=True, or fa.seeing.Throughput(...)",
        )


class Measures(AbstractContextManager["Measures"]):
    """In the body, the measurements of the steps of a loop.

    Args:
        train_step: whose steps.
        watch: what is measured: throughput, memory, or both.
    """

    def __init__(self, train_step: TrainStep, watch: Watch) -> None:
        device, throughput = train_step.mesh.world.device, watch.throughput
        self._train_step = train_step
        self._what = throughput
        self._meter = None if throughput is None else Meter(throughput.window)
        self._peaks = Peaks(device) if watch.memory else None
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


def collected(every: int, steps: Steps) -> Steps:
    """Pass steps on. Python's collector runs after each `every`th step, and not between."""
    with no_collection(), closing(steps):
        frozen = gc.get_freeze_count()  # by a launcher, before it forked
        gc.freeze()  # what was there before the loop is not looked at: a collection of torch takes 0.1 s
        try:
            for state, metrics in steps:
                if state.step % every == 0:
                    gc.collect()
                yield state, metrics
        finally:
            if not frozen:
                gc.unfreeze()


def _micros(batch: Batch | Window) -> tuple[Batch, ...]:
    return tuple(batch) if isinstance(batch, Window) else (batch,)
