"""What a runtime carries out itself, decided before anything runs: the extension point for runtimes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from fnaccel.step.step import Step
from fnaccel.strategies.strategy import Strategy
from fnaccel.world.mesh import Mesh


@attrs.frozen(kw_only=True)
class Ask:
    """What a runtime is told of a train step: `optimizers` by model, None for one that only looks."""

    step: Step
    strategy: Strategy
    optimizers: Mapping[str | None, Any] | None
    mesh: Mesh
    model: Any


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


Delegator = Callable[[Ask], Delegation]

_delegators: dict[type, Delegator] = {}


def delegator(axis: type) -> Callable[[Delegator], Delegator]:
    """Decorator: this function says what the runtime behind an axis record carries out."""

    def register(fn: Delegator) -> Delegator:
        _delegators[axis] = fn
        return fn

    return register


def delegate(ask: Ask) -> Delegation | None:
    """What the runtime of a strategy carries out; None where no axis belongs to one.

    Raises:
        CapabilityError, ConfigError: the step asks for what the runtime can't do, or contradicts its
            configuration.
    """
    for axis in ask.strategy.axes:
        if type(axis) in _delegators:
            return _delegators[type(axis)](ask)
    return None
