"""Quantized models on several devices: exact sizes before loading, and codes that are fetched as codes."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel.errors import CapabilityError
from tests.big.movers import Simulated
from tests.big.quantize.models import RECORDS, Net, empty, made, same


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_sizes_of_an_empty_model_are_those_of_the_full_one(record):
    kind = lambda: Net(256)  # noqa: E731
    expected = fa.big.sizes(fa.big.quantize(made(kind), record))
    quantized = fa.big.sizes(fa.big.quantize(empty(kind), record))
    assert quantized.modules == expected.modules
    assert quantized.total < 0.35 * fa.big.sizes(Net(256)).total


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_offloaded_layers_stay_quantized(record, tmp_path):
    model = fa.big.quantize(made(), record).eval()
    x = made(lambda: torch.randn(4, 128))
    expected, codes = model(x), {name: value.clone() for name, value in model.named_buffers()}
    places = {"up": "disk", "down": "disk", "norm": "cpu", "lm_head": "cpu"}
    run = fa.big.dispatch(model, places, folder=tmp_path)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    for _ in range(2):
        assert torch.equal(model(x), expected)
    assert sum(value.nbytes for value in codes.values()) <= written < 0.5 * 2 * 128 * 256 * 4
    run.remove()
    assert same(dict(model.named_buffers()), codes)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_a_state_dict_of_layers_that_are_elsewhere_has_their_codes(record):
    model = fa.big.quantize(made(), record).eval()
    x = made(lambda: torch.randn(4, 128))
    stored = {name: value.clone() for name, value in model.state_dict().items()}
    part = {name: value.clone() for name, value in model.up.state_dict().items()}
    expected = model(x)
    run = fa.big.offload(model, 0, mover=Simulated())
    for _ in range(2):
        assert same(dict(model.state_dict()), stored)
        assert same(dict(model.up.state_dict()), part)
        assert torch.equal(model(x), expected)
    run.remove()
    assert same(dict(model.state_dict()), stored)


def test_an_empty_layer_says_so_when_it_is_saved(tmp_path):
    model = fa.big.quantize(empty(), fa.big.Nf4())
    names = list(fa.big.quantize(Net(), fa.big.Nf4()).state_dict())
    assert list(model.state_dict()) == names
    assert all(value.is_meta for name, value in model.state_dict().items() if "norm" not in name)
    with pytest.raises(CapabilityError, match="no values yet"):
        fa.big.save_quantized(tmp_path / "a", model)
