"""`Settings`: the wishes of all transforms of a step, put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import attrs

from fnaccel.step.precision_policy import Precision


class Compiler(Protocol):
    """How a step is compiled: the record of `fa.compile`."""

    @property
    def scope(self) -> str:
        """`"auto"`, `"block"`, `"loss"` or `"step"`."""
        ...

    @property
    def backend(self) -> Any:
        """As `torch.compile` takes it."""
        ...

    @property
    def mode(self) -> str | None:
        """As `torch.compile` takes it."""
        ...

    @property
    def replays(self) -> bool:
        """Whether the programs are CUDA graphs, which write to the same memory each time."""
        ...

    @property
    def limit(self) -> int:
        """How often a train step may compile again."""
        ...

    @property
    def process(self) -> Any:
        """What compiles while steps run uncompiled, or None."""
        ...

    @property
    def dims(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(pattern of a leaf's path, dimensions that vary) for leaves of the batch."""
        ...

    def of_loss(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A loss function, compiled."""
        ...

    def of_step(
        self, fn: Callable[..., Any], graph_pass: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """A part of a train step, compiled as one graph."""
        ...


@attrs.frozen(kw_only=True)
class Settings:
    """How a step is to run.

    Attributes:
        precision: the dtypes, and the loss scale.
        casts: whether a precision was given, so that parameters follow it.
        micro_batches: in how many each batch is cut, 0 if it stays whole.
        sync_each: whether gradients are averaged over ranks after each micro-batch.
        weight_fn: gives the weight of a batch from the batch alone. None if the loss gives it.
        max_norm: the norm to which gradients are clipped, or None.
        ema_decay: of the averages of the parameters, a number or a schedule, or None.
        ema_buffers: whether buffers are averaged as well.
        leaves_out_nonfinite: whether an update whose gradient is not finite is left out.
        max_left_out: how many of them in a row are an error, or None.
        compiler: how it is compiled, or None.
    """

    precision: Precision = attrs.field(factory=Precision)
    casts: bool = False
    micro_batches: int = 0
    sync_each: bool = False
    weight_fn: Callable[[Any], Any] | None = None
    max_norm: float | None = None
    ema_decay: float | Callable[[Any], Any] | None = None
    ema_buffers: bool = False
    leaves_out_nonfinite: bool = False
    max_left_out: int | None = None
    compiler: Compiler | None = None

    @property
    def skips(self) -> bool:
        """Whether an update may be left out on the device."""
        return self.leaves_out_nonfinite or self.precision.scaled

    @property
    def max_skipped(self) -> int | None:
        """Updates skipped in a row that are an error, or None."""
        limits = [self.max_left_out if self.leaves_out_nonfinite else None]
        limits += [self.precision.max_skipped] if self.precision.scaled else []
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def captured(self) -> bool:
        """Whether the step is captured as one graph."""
        return self.compiler is not None and self.compiler.scope == "step"


@runtime_checkable
class Configures(Protocol):
    """A record of a transform that sets some of `Settings`."""

    def configure(self, settings: Settings) -> Settings:
        """The settings, with those of this transform."""
        ...
