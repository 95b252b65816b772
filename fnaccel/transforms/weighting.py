"""`with_weight`: the weight of a batch from the batch alone, known before any forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from fnaccel.errors import require
from fnaccel.step.chain import takes_step
from fnaccel.step.settings import Settings
from fnaccel.step.step import Phase, Transform


@attrs.frozen
class Weigh:
    """The function that weighs a micro-batch."""

    weight_fn: Callable[[Any], Any]

    def configure(self, settings: Settings) -> Settings:
        """Weigh batches up front."""
        return attrs.evolve(settings, weight_fn=self.weight_fn)


@takes_step
def with_weight(weight_fn: Callable[[Any], Any]) -> Transform:
    """Divide totals by the global weight up front, instead of dividing gradients afterwards.

    The loss function then returns a bare total (or a `Mean`, whose weight is replaced). Better
    scaled in fp16, and needed if an engine clips inside its own step.

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        weight_fn: `weight_fn(batch) -> int, float or 0-d tensor`, without the model.

    Raises:
        ArgumentError: `weight_fn` can't be called.

    Example:
        >>> step = fa.with_weight(loss_fn, lambda batch: batch["labels"].numel())
    """
    require(
        callable(weight_fn),
        f"weight_fn is {type(weight_fn).__name__}, which can't be called",
        "fa.with_weight",
        "pass a function weight_fn(batch)",
    )
    return Transform("with_weight", Phase.BACKWARD, apply=Weigh(weight_fn))
