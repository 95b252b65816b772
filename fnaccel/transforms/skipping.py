"""`skip_nonfinite`: an update whose gradient holds a NaN or an infinity is not applied."""

from __future__ import annotations

from typing import Any

import attrs

from fnaccel.step import Capability, Phase, Step, Transform, append


@attrs.frozen
class SkipNonfinite:
    """Decide on the device, without a host read, whether the update is applied."""

    def on_gradients(self, grads: Any, own: Any, info: Any) -> Any:  # noqa: ARG002
        """Mark the update as skipped where the gradient norm is not finite."""
        grads.skip_where_nonfinite()
        return own


def skip_nonfinite(step: Any) -> Step:
    """Leave parameters, optimizer, schedule and EMA as they are where a gradient is not finite.

    `metrics["skipped"]` is 1.0 for such a step, and `state.updates` does not count it. Precision
    `"fp16"` does the same by itself.

    Args:
        step: a step or a loss function.

    Example: `step = fa.skip_nonfinite(loss_fn)`.
    """
    return append(
        step,
        Transform(
            "skip_nonfinite",
            Phase.GRADS,
            apply=SkipNonfinite(),
            needs=frozenset({Capability.GRADIENTS}),
        ),
    )
