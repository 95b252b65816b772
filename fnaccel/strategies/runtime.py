"""The part of a step that a runtime carries out, decided before anything runs: runtimes extend this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from fnaccel.errors import WorldError
from fnaccel.step.spec import Spec
from fnaccel.step.step import Step


@attrs.frozen(kw_only=True)
class Delegation:
    """The part of a step that a runtime carries out itself.

    Attributes:
        step: the step, with the transforms that the runtime's own configuration adds.
        by: the runtime's name in the plan.
        names: the transforms it carries out itself. These need no capability of the strategy.
        config: its configuration, complete, as it will be used.
        notes: lines for the plan.
        rows: how many rows a rank's micro-batch must have. None: any number.
    """

    step: Step
    by: str
    names: frozenset[str]
    config: dict[str, Any]
    notes: tuple[str, ...] = ()
    rows: int | None = None


_NEEDED = {"xla": "fa.distribute(model, fa.xla()); or fa.xla(shard=True) for the memory of fsdp"}
"""The fix for a device that needs a runtime which ends the graph of each step."""


def check_device(spec: Spec) -> None:
    """Raise WorldError if the device needs a runtime, and the strategy has none that runs on it."""
    device = spec.mesh.world.device.type
    if device in _NEEDED and all(axis.runs_on != device for axis in spec.strategy.axes):
        raise WorldError(
            f"{spec.strategy} does not know {device.upper()} devices: nothing would end the graph of a step",
            where="fa.train_step",
            fix=_NEEDED[device],
        )


Delegator = Callable[[Spec, Any], Delegation]

_delegators: dict[type, Delegator] = {}


def delegator(axis: type) -> Callable[[Delegator], Delegator]:
    """Decorator: this function returns the `Delegation` of the runtime behind an axis record."""

    def register(fn: Delegator) -> Delegator:
        _delegators[axis] = fn
        return fn

    return register


def delegate(spec: Spec) -> Delegation | None:
    """The `Delegation` of a strategy's runtime. None if no axis belongs to a runtime.

    Raises:
        CapabilityError, ConfigError: the step needs a capability that the runtime lacks, or contradicts its
            configuration.
    """
    for axis in spec.strategy.axes:
        if type(axis) in _delegators:
            return _delegators[type(axis)](spec, axis)
    return None
