"""What a runtime carries out itself, decided before anything runs: the extension point for runtimes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from fnaccel.errors import WorldError
from fnaccel.step.spec import Spec
from fnaccel.step.step import Step


@attrs.frozen(kw_only=True)
class Delegation:
    """What a runtime answers.

    Attributes:
        step: the step, with what the runtime's own configuration adds to it.
        by: what the plan calls the runtime.
        names: the transforms it carries out itself; these need no capability of the strategy.
        config: its configuration, complete, as it will be used.
        notes: what the plan has to say.
        rows: how many rows a rank's micro-batch must have; None: any.
    """

    step: Step
    by: str
    names: frozenset[str]
    config: dict[str, Any]
    notes: tuple[str, ...] = ()
    rows: int | None = None


_NEEDED = {"xla": "fa.distribute(model, fa.xla()); or fa.xla(shard=True) for the memory of fsdp"}
"""What to say of a device that needs a runtime which ends the graph of each step."""


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
    """Decorator: this function says what the runtime behind an axis record carries out."""

    def register(fn: Delegator) -> Delegator:
        _delegators[axis] = fn
        return fn

    return register


def delegate(spec: Spec) -> Delegation | None:
    """What the runtime of a strategy carries out; None where no axis belongs to one.

    Raises:
        CapabilityError, ConfigError: the step asks for what the runtime can't do, or contradicts its
            configuration.
    """
    for axis in spec.strategy.axes:
        if type(axis) in _delegators:
            return _delegators[type(axis)](spec, axis)
    return None
