"""Dispatched modules: one can ask, and traced graphs work too."""

from __future__ import annotations

import torch
from torch import nn

import fnaccel as fa
from tests.big.movers import Simulated


def test_an_offloaded_module_is_known():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).requires_grad_(False)
    assert fa.big.dispatch_of(model) is None
    fa.big.dispatch(model, {"0": 0, "1": "cpu"}, device=0, mover=Simulated())  # the result is not kept
    assert fa.big.dispatch_of(model) is not None
    assert model[1].weight.is_meta
    assert not model[0].weight.is_meta


def test_a_traced_graph_is_dispatched():
    model = torch.fx.symbolic_trace(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    ).requires_grad_(False)
    x = torch.ones(1, 3)
    expected = model(x)
    run = fa.big.dispatch(model, {"": "cpu"}, device=0, mover=Simulated())
    assert torch.equal(model(x), expected)
    run.remove()
    assert torch.equal(model(x), expected)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), expected)
