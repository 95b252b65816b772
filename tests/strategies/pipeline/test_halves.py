"""A backward in two parts gives the gradients of one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fnaccel.strategies.pipeline.halves import backward_of_inputs


def plain(x, w, v):
    return [torch.tanh(x @ w) @ v]


def skips(x, w, v):
    return [x + w, (x @ v).tanh()]


def aside(x, w, v):
    """One weight meets the inputs nowhere."""
    return [x @ w, v.square().sum(0)]


def view(x, w, v):
    return [((x @ w) * v).t()]


def twice(x, w, v):
    first = torch.tanh(x @ w)
    return [first @ w + v]


def between(x, w, v):
    """An output from which another one is computed."""
    hidden = x @ w
    return [hidden, hidden @ v]


def begun(anchor, value):
    return value + 0 * anchor


GRAPHS = [plain, skips, aside, view, twice, between]


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_halves_add_up_over_micro_batches(graph):
    draw = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 4, generator=draw, dtype=torch.float64)) for _ in range(2)]
    passes = []
    for _ in range(3):
        value = torch.randn(4, 4, generator=draw, dtype=torch.float64)
        outputs = graph(value, *weights)
        passes.append((value, [torch.randn(x.shape, generator=draw, dtype=x.dtype) for x in outputs]))
    for value, grads in passes:
        torch.autograd.backward(graph(value, *weights), grads)
    expected = [weight.grad.clone() for weight in weights]

    for weight in weights:
        weight.grad = None
    left = []
    for value, grads in passes:
        anchor = torch.zeros((), dtype=torch.float64, requires_grad=True)
        sent = [grad.clone() for grad in grads]
        left.append((backward_of_inputs(graph(begun(anchor, value), *weights), sent, anchor, weights), sent))
    for rest, _ in left:
        rest()
    for (_, sent), (_, grads) in zip(left, passes, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(sent, grads, strict=True)), "not written to"
    for weight, grad in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, grad)


def test_the_first_half_leaves_the_weights_alone():
    weight = nn.Parameter(torch.ones(4, 4))
    anchor = torch.zeros((), requires_grad=True)
    outputs = [begun(anchor, torch.ones(4, 4)) @ weight]
    rest = backward_of_inputs(outputs, [torch.ones(4, 4)], anchor, [weight])
    assert weight.grad is None
    rest()
    torch.testing.assert_close(weight.grad, torch.full((4, 4), 4.0))
