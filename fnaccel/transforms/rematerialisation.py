"""`remat`: compute activations again in the backward pass instead of keeping them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fnaccel.errors import CapabilityError
from fnaccel.models.blocks import Units, find_units
from fnaccel.step.spec import Spec
from fnaccel.step.step import Capability, Phase, Step, StepLike, Transform, append
from fnaccel.tree import Tree


@attrs.frozen
class Remat:
    """Which modules run under activation checkpointing."""

    units: Units = "block"

    def obstacle_to_capture(self, spec: Spec) -> str:  # noqa: ARG002
        """Forward and backward of one graph share their activations."""
        return "remat needs forward and backward as two programs"

    def on_module(self, module: nn.Module, where: str) -> None:
        """Patch `forward` in place, so that parameter names stay as they are."""
        units = find_units(module, self.units, where)
        if not units:
            raise CapabilityError(
                f"the model has no modules that remat(units={self.units!r}) could recompute",
                where=where,
                fix='name their classes: fa.remat(step, units=("Block",))',
            )
        functions: dict[Any, Any] = {}
        for _, unit in units:
            forward: Any = unit.forward
            plain = getattr(forward, "__func__", None)
            if plain is None:
                unit.forward = types.MethodType(
                    _recomputing(lambda _, *a, run=forward, **k: run(*a, **k)), unit
                )
            else:  # one function for equal blocks, so that one compilation may serve them
                unit.forward = types.MethodType(functions.setdefault(plain, _recomputing(plain)), unit)


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            # the second run of a block would append its keys and values a second time
            args = tuple(None if _is_cache(value) else value for value in args)
            kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
            if kwargs.get("use_cache"):
                kwargs["use_cache"] = False
        return checkpoint(functools.partial(forward, module), *args, use_reentrant=False, **kwargs)

    return recomputed


def _is_cache(value: Tree) -> bool:
    """Whether an argument is a cache of keys and values, as transformers' models pass to their blocks."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def remat(step: StepLike, units: Units = "block") -> Step:
    """Trade compute for memory: run each block again in backward (Chen et al. 2016).

    A cache of keys and values that a transformers model passes to its blocks is left out while it trains, as
    `gradient_checkpointing_enable` does: a block that runs twice would append to it twice.

    Args:
        step: a step or a loss function.
        units: `"block"`, class names, a least size, or a function: see `fnaccel.models.blocks`.

    Raises:
        CapabilityError: at `init`, if no module matches.

    Example:
        >>> step = fa.remat(loss_fn)
    """
    chosen = tuple(units) if isinstance(units, list) else units
    return append(
        step,
        Transform("remat", Phase.MODULE, apply=Remat(chosen), needs=frozenset({Capability.MODULES})),
    )
