"""The private names of torch and of transformers that pipelines read."""

# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

NUMBERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
"""Operations that give a number or a truth value, and no tensor. (2.13)"""


def grads_of_inputs(
    outputs: list[torch.Tensor],
    grads: Sequence[torch.Tensor],
    anchor: torch.Tensor,
    weights: Sequence[nn.Parameter],
) -> list[dict[str, Any]]:
    """Differentiate outputs as far as a leaf. Returns what `grads_of_weights` takes. (2.9 to 2.13)"""
    from torch.distributed.pipelining import _backward  # noqa: PLC0415 - slow to import

    return _backward.stage_backward_input(outputs, list(grads), [anchor], iter(weights))[1]


def grads_of_weights(weights: Sequence[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """Add the gradients of weights, from where `grads_of_inputs` has stopped. (2.9 to 2.13)"""
    from torch.distributed.pipelining import _backward  # noqa: PLC0415 - slow to import

    # with a weight that is used twice, the way of one group goes through that of another
    _backward.stage_backward_weight(iter(weights), groups, retain_graph=True)


def as_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of torch on tensors of a subclass, as those of torch's own class."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def base_of(value: object) -> torch.Tensor | None:
    """The tensor that a tensor is a view of."""
    return value._base if isinstance(value, torch.Tensor) else None


def listeners_of(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Those of some modules, by path, that have a forward hook which is at work."""
    for path, module in modules:
        if module._forward_hooks and any(map(_listens, module._forward_hooks.values())):
            yield path, module


def _listens(hook: Any) -> bool:
    """Whether a hook is the user's, and at work: not torch's or ours, and not idle in transformers."""
    inner = getattr(hook, "func", hook)
    source = str(getattr(inner, "__module__", ""))
    if source.split(".")[0] in ("torch", "fnaccel"):
        return False
    if source != "transformers.utils.output_capturing":
        return True
    # its hooks stay in a model after the first forward that asked for outputs
    capturing: Any = sys.modules[source]
    return capturing._active_collector.get() is not None  # (5.23)
