"""`clip_norm` and `clip_value`: bound the gradient of the whole model, sharded or not."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from fnaccel.errors import require
from fnaccel.step.chain import takes_step
from fnaccel.step.settings import Settings
from fnaccel.step.step import Capability, Info, Phase, Transform
from fnaccel.tree import Tree

if TYPE_CHECKING:
    from fnaccel.engine.gradients import Gradients

_NEEDS = frozenset({Capability.GRADIENTS})


@attrs.frozen
class ClipNorm:
    """Scale the gradient down to a Euclidean norm of at most `max_norm`."""

    pure: ClassVar[bool] = True
    max_norm: float

    def configure(self, settings: Settings) -> Settings:
        """Clip the norm."""
        return attrs.evolve(settings, max_norm=self.max_norm)

    def on_gradients(self, grads: Gradients, state: Tree, info: Info) -> Any:
        """Fold the clip into the one multiply of the update. Records `grad_norm`, before the clip."""
        norm = grads.norm()
        info.record("grad_norm", norm)
        # `number / tensor` does the same in three times the time
        grads.scale_by((norm.add(1e-6).reciprocal() * self.max_norm).clamp_max(1.0))
        return state


@attrs.frozen
class ClipValue:
    """Clamp each element of the gradient to at most `max_value` in size."""

    pure: ClassVar[bool] = True
    max_value: float

    def on_gradients(self, grads: Gradients, state: Tree, info: Info) -> Any:  # noqa: ARG002
        """Clamp after averaging and unscaling."""
        grads.clamp(self.max_value)
        return state


@takes_step
def clip_norm(max_norm: float) -> Transform:
    """Clip the global gradient norm, as `torch.nn.utils.clip_grad_norm_` does (Pascanu et al. 2013).

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        max_norm: the largest norm allowed. The norm before clipping is `metrics["grad_norm"]`.

    Raises:
        ArgumentError: `max_norm` is not positive.

    Example:
        >>> step = fa.clip_norm(loss_fn, 1.0)
    """
    positive = isinstance(max_norm, Real) and max_norm > 0
    require(positive, f"a norm can't be clipped to {max_norm}", "fa.clip_norm", "max_norm is positive")
    return Transform("clip_norm", Phase.GRADS, apply=ClipNorm(float(max_norm)), needs=_NEEDS)


@takes_step
def clip_value(max_value: float) -> Transform:
    """Clamp each element of the gradient to `[-max_value, max_value]`.

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        max_value: the largest size of an element.

    Raises:
        ArgumentError: `max_value` is not positive.

    Example:
        >>> step = fa.clip_value(loss_fn, 0.5)
    """
    require(
        isinstance(max_value, Real) and max_value > 0,
        f"values can't be clipped to {max_value}",
        "fa.clip_value",
        "max_value is positive",
    )
    return Transform("clip_value", Phase.GRADS, apply=ClipValue(float(max_value)), needs=_NEEDS)
