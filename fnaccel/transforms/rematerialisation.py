"""`remat`: compute activations again in the backward pass instead of keeping them."""

from __future__ import annotations

import functools
from typing import Any

import attrs
from torch import nn
from torch.utils.checkpoint import checkpoint

from fnaccel.errors import CapabilityError
from fnaccel.step import Capability, Phase, Step, Transform, append
from fnaccel.units import Units, find_units


@attrs.frozen
class Remat:
    """Which modules run under activation checkpointing."""

    units: Units = "block"

    def on_module(self, module: nn.Module, where: str) -> None:
        """Patch `forward` in place, so that parameter names stay as they are."""
        found = find_units(module, self.units, where)
        if not found:
            raise CapabilityError(
                f"the model has no modules that remat(units={self.units!r}) could recompute",
                where=where,
                fix='name their classes: fa.remat(step, units=("Block",))',
            )
        for _, unit in found:
            unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)


def remat(step: Any, units: Units = "block") -> Step:
    """Trade compute for memory: run each block again in backward (Chen et al. 2016).

    Args:
        step: a step or a loss function.
        units: `"block"`, class names, a least size, or a function: see `fnaccel.units`.

    Raises:
        CapabilityError: at `init`, where no module matches.

    Example: `step = fa.remat(loss_fn)`.
    """
    chosen = tuple(units) if isinstance(units, list) else units
    return append(
        step,
        Transform("remat", Phase.MODULE, apply=Remat(chosen), needs=frozenset({Capability.MODULES})),
    )
