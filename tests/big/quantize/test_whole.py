"""An error in the middle of quantizing, or of loading codes, changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.big.quantize.bitsandbytes_4bit import QuantizedLayer as Layer

pytest.importorskip("bitsandbytes")


def test_a_layer_that_fails_leaves_the_model_as_it_was(monkeypatch):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.LayerNorm(64)).to(torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds, calls = [type(layer) for layer in model], []
    made = type(fa.big.quantize(nn.Sequential(nn.Linear(64, 64)), fa.big.Nf4())[0])
    real = made.encode

    def fails(layer, weight):
        calls.append(layer)
        if len(calls) == 3:
            raise RuntimeError("no memory")
        real(layer, weight)

    monkeypatch.setattr(made, "encode", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        fa.big.quantize(model, fa.big.Nf4(keep="3"))
    assert [type(layer) for layer in model] == kinds
    assert all(param.requires_grad for param in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}


def test_codes_that_do_not_fit_leave_a_layer_as_it_was():
    model = fa.big.quantize(nn.Sequential(nn.Linear(64, 64)), fa.big.Nf4())
    other = fa.big.quantize(nn.Sequential(nn.Linear(64, 64)), fa.big.Nf4()).state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    last = "0.weight.absmax"
    other[last] = other[last].repeat(2)
    assert isinstance(model[0], Layer)
    with pytest.raises(RuntimeError, match="and this layer has"):
        model.load_state_dict(other)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
