"""What a transform can say of a model before anything is built: its modules without values, and notes."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import nn

from fnaccel.step.step import Step


@attrs.frozen(kw_only=True)
class Prospect:
    """What is known when a plan is made.

    Attributes:
        step: the step, its compile scope chosen.
        model: a factory, a module, or a dict of them.
        strategy: of the model.
        device: where this rank computes.
        ranks: how many there are.
        frozen: patterns of the parameters that are not trained.
        trains: whether there is an optimizer; nothing is trained without one.
        runtime: the runtime that carries out the update; empty without one.
    """

    step: Step
    model: Any
    strategy: Any
    device: torch.device
    ranks: int = 1
    frozen: tuple[str, ...] = ()
    trains: bool = True
    runtime: str = ""


@runtime_checkable
class Foresees(Protocol):
    """A record that checks itself against model, strategy and device, and adds notes to the plan."""

    def foresee(self, prospect: Prospect) -> list[str]:
        """Notes for the plan; raises where the step could not be carried out."""
        ...


def modules_without_values(model: Any) -> dict[str | None, nn.Module | str]:
    """The modules of a model by key, made on the meta device; or why one can't be made so.

    A factory runs once more than `init` runs it; nothing is allocated, and torch's generator is left
    as it was. A module that was given is returned itself.

    Args:
        model: a factory, a module, or a dict of them.
    """
    parts = model if isinstance(model, dict) else {None: model}
    return {key: _one(source) for key, source in parts.items()}


def _one(source: Any) -> nn.Module | str:
    if isinstance(source, nn.Module):
        return source
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            made = source()
    except Exception as error:  # the user's own code: init will raise it again, or not
        return f"the factory can't run without values ({type(error).__name__})"
    return made if isinstance(made, nn.Module) else f"the factory returns {type(made).__name__}"
