"""torch's learning-rate schedulers as schedules: the rates are read once, and kept by update."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from fnaccel.errors import ArgumentError, CapabilityError
from fnaccel.step.callables import name_of

_OTHERS = {"momentum": 0.8901, "betas": (0.8901, 0.9909), "weight_decay": 0.0109}
"""Options of an optimizer besides the rate, which a scheduler may read but not change.

No scheduler sets these values by default, so a change shows at once.
"""


class _Stepped(torch.optim.Optimizer):
    """An optimizer whose rate a scheduler can move. It updates nothing."""

    def step(self, closure: Any = None) -> Any:
        """Schedulers warn unless this was called."""


def _needs_metric(step: Callable[..., Any]) -> bool:
    parameters = inspect.signature(step).parameters.values()
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters
    )


class FromTorch:
    """A torch LRScheduler as a pure function: its values are replayed once and remembered.

    It works on ints only: if updates are counted on the device it costs one host read a step,
    and the plan says so.
    """

    host_only = True

    def __init__(self, factory: Callable[[Any], Any], lr: float) -> None:
        self.factory = factory
        self.lr = lr
        self._restart()

    def _restart(self) -> None:
        self._optimizer = _Stepped([torch.zeros(1, requires_grad=True)], {"lr": self.lr, **_OTHERS})
        self._scheduler = self.factory(self._optimizer)
        step = getattr(self._scheduler, "step", None)
        if isinstance(self._scheduler, type) or not callable(step):
            raise ArgumentError(
                f"the function returned {self._scheduler!r}, which is no scheduler",
                where="fa.schedules.from_torch_scheduler",
                fix="fa.schedules.from_torch_scheduler(lambda optimizer: StepLR(optimizer, 30), lr=0.1)",
            )
        if _needs_metric(step):
            raise ArgumentError(
                f"{type(self._scheduler).__name__} needs a metric, and a schedule is a function of updates",
                where="fa.schedules.from_torch_scheduler",
                fix="pass a function of yours, lr=lambda updates: 3e-4 * plateau.factor, and lower the "
                "factor on all ranks when the metric of fa.evaluate stalls",
            )
        self._values = [self._rate()]

    def _rate(self) -> float:
        """The rate of this moment.

        Raises:
            CapabilityError: the scheduler changes more than the rate.
        """
        group = self._optimizer.param_groups[0]
        changed = [name for name, value in _OTHERS.items() if group[name] != value]
        if changed:
            raise CapabilityError(
                f"{type(self._scheduler).__name__} changes {' and '.join(changed)} besides the rate, "
                "which a schedule can't",
                where="fa.schedules.from_torch_scheduler",
                fix="pass cycle_momentum=False to OneCycleLR or CyclicLR",
            )
        return float(group["lr"])

    def __call__(self, updates: int) -> float:
        """The rate after `updates` updates."""
        while len(self._values) <= updates:
            self._optimizer.step()
            self._scheduler.step()
            self._values.append(self._rate())
        return self._values[updates]

    def __repr__(self) -> str:
        return f"from_torch_scheduler({name_of(self.factory)}, lr={self.lr})"

    def __getstate__(self) -> dict[str, Any]:
        return {"factory": self.factory, "lr": self.lr}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.factory, self.lr = state["factory"], state["lr"]
        self._restart()


def from_torch_scheduler(factory: Callable[[Any], Any], *, lr: float) -> FromTorch:
    """A schedule from a torch `LRScheduler`, stepped once per applied update.

    Args:
        factory: `factory(optimizer) -> LRScheduler`. Schedulers that need a metric don't fit.
        lr: the optimizer's base rate.

    Raises:
        ArgumentError: it steps by a metric, as ReduceLROnPlateau does.
        CapabilityError: it changes the momentum or betas too, as OneCycleLR and CyclicLR do by default.

    Example:
        >>> from torch.optim.lr_scheduler import StepLR
        >>> schedule = fa.schedules.from_torch_scheduler(lambda optimizer: StepLR(optimizer, 30), lr=0.1)
        >>> schedule(29), round(schedule(30), 3)
        (0.1, 0.01)
    """
    return FromTorch(factory, lr)
