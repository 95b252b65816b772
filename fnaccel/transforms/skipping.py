"""`skip_nonfinite`: an update whose gradient holds a NaN or an infinity is not applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from fnaccel.errors import require
from fnaccel.step.chain import takes_step
from fnaccel.step.settings import Settings
from fnaccel.step.step import Capability, Info, Phase, Transform
from fnaccel.tree import Tree

if TYPE_CHECKING:
    from fnaccel.engine.gradients import Gradients


@attrs.frozen
class SkipNonfinite:
    """Decide on the device, without a host read, whether the update is applied."""

    pure: ClassVar[bool] = True
    max_skipped: int | None = 200

    def configure(self, settings: Settings) -> Settings:
        """Leave updates out whose gradient is not finite."""
        return attrs.evolve(settings, leaves_out_nonfinite=True, max_left_out=self.max_skipped)

    def on_gradients(self, grads: Gradients, state: Tree, info: Info) -> Any:  # noqa: ARG002
        """Mark the update as skipped if the gradient norm is not finite."""
        grads.skip_where_nonfinite()
        return state


@takes_step
def skip_nonfinite(*, max_skipped: int | None = 200) -> Transform:
    """Leave parameters, optimizer, schedule and EMA as they are if a gradient is not finite.

    `metrics["skipped"]` is 1.0 for such a step, and `state.updates` does not count it. Precision
    `"fp16"` does the same by itself. After 25 skipped updates in a row there is a warning.

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        max_skipped: the number of updates skipped in a row after which the next call raises NonfiniteError
            (the state stays live). None allows any number.

    Raises:
        ArgumentError: `max_skipped` is below 1.

    Example:
        >>> step = fa.skip_nonfinite(loss_fn)
    """
    require(
        max_skipped is None or max_skipped >= 1,
        f"max_skipped={max_skipped}",
        "fa.skip_nonfinite",
        "a count of 1 or more, or None",
    )
    return Transform(
        "skip_nonfinite",
        Phase.GRADS,
        apply=SkipNonfinite(max_skipped),
        needs=frozenset({Capability.GRADIENTS}),
    )
