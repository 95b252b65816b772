"""A backward in two parts: the gradients of a stage's inputs at once, and those of its weights later.

https://arxiv.org/abs/2401.10241
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from fnaccel.strategies.pipeline._torch import grads_of_inputs, grads_of_weights


class _Alias(torch.autograd.Function):
    """The same values, in a tensor that is no view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    anchor: torch.Tensor,
    weights: Sequence[nn.Parameter],
) -> Callable[[], None]:
    """Differentiate outputs as far as the inputs, and return the function that does the rest.

    Args:
        outputs: of a stage.
        grads: theirs.
        anchor: the leaf in which the graph of the inputs begins.
        weights: the rest adds to their gradients.
    """
    outputs = [_Alias.apply(x) for x in outputs]  # torch detaches them in place
    ends = [get_gradient_edge(x) for x in outputs]
    groups = grads_of_inputs(outputs, grads, anchor, weights)
    grouped = {node for group in groups for node in group["params"]}
    reached = _reached(ends)
    apart = [w for w in weights if (node := get_gradient_edge(w).node) in reached and node not in grouped]
    if apart:  # their way to the outputs does not meet that of the inputs
        _add(apart, torch.autograd.grad(ends, apart, grads, retain_graph=True))
    return functools.partial(_backward_of_weights, weights, groups)


def _reached(ends: Sequence[GradientEdge]) -> set[Node]:
    """The nodes of a graph."""
    seen: set[Node] = set()
    nodes = [end.node for end in ends]
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions if following is not None]
    return seen


def _backward_of_weights(weights: Sequence[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """Add to the gradients of weights. torch would make the one of a first micro-batch an alias."""
    before = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    grads_of_weights(weights, groups)
    found = [weight.grad for weight in weights]
    for weight, grad in zip(weights, before, strict=True):
        weight.grad = grad
    _add(weights, found)


def _add(weights: Sequence[nn.Parameter], grads: Sequence[torch.Tensor | None]) -> None:
    for weight, grad in zip(weights, grads, strict=True):
        if grad is not None:
            weight.grad = grad.clone() if weight.grad is None else weight.grad.add_(grad)
