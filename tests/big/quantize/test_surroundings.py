"""Quantized layers among other code: modules that read their weights, hooks, state dicts, files, mistakes."""

from __future__ import annotations

import copy

import attrs
import pytest
import safetensors.torch
import torch
from torch import nn

import fnaccel as fa
from fnaccel.errors import ArgumentError, CheckpointError, OwnershipError
from tests.big.quantize.models import RECORDS, Net, empty, made, same

ALL = pytest.mark.parametrize("record", RECORDS, ids=str)


@ALL
@pytest.mark.parametrize("assign", [True, False], ids=["assign", "copy"])
def test_a_state_dict_fills_an_empty_model(record, assign):
    full = fa.big.quantize(made(), record).eval()
    nn.init.constant_(full.up.bias, 3.0)
    model = fa.big.quantize(empty(), record).eval()
    if not assign:  # torch does not copy into layers without values
        model.norm, model.lm_head = copy.deepcopy(full.norm), copy.deepcopy(full.lm_head)
    model.load_state_dict(full.state_dict(), assign=assign)
    assert same(dict(model.state_dict()), dict(full.state_dict()))
    x = made(lambda: torch.randn(3, 128))
    assert torch.equal(model(x), full(x))


@ALL
def test_a_bias_of_another_shape_is_an_error(record):
    model = fa.big.quantize(made(), record)
    values = model.state_dict() | {"up.bias": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"up\.bias is \[1\], and this layer has \[256\]"):
        model.load_state_dict(values)


@ALL
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_an_encoder_of_torch(record, train):
    """In evaluation it reads the weights of its linear layers itself, unless they override functions."""
    layer = made(lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True))
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = made(lambda: torch.randn(2, 7, 64))
    with torch.no_grad():
        expected = model(x)
        found = fa.big.quantize(model, attrs.evolve(record, **small(record))).train(train)(x)
    assert (found - expected).norm() < 0.15 * expected.norm()


def small(record):
    """A block that divides the rows of a small model."""
    return {"block": 32} if hasattr(record, "block") else {}


def test_hooks_of_a_layer_stay():
    model, calls = made(), []
    handle = model.up.register_forward_hook(lambda *_: calls.append("after"))
    model.up.register_forward_pre_hook(lambda _, args, kwargs: calls.append("before"), with_kwargs=True)
    x = torch.ones(1, 128)
    fa.big.quantize(model, fa.big.Nf4())(x)
    assert calls == ["before", "after"]
    handle.remove()
    fa.big.dequantize(model)(x)
    assert calls == ["before", "after", "before"]


def test_a_layer_whose_weight_a_hook_computes_is_left():
    model = made()
    with pytest.warns(FutureWarning, match="weight_norm"):
        torch.nn.utils.weight_norm(model.up)
    assert fa.big.chosen_layers(model, fa.big.Nf4()).skipped["up"] == "a hook computes its weight"


@ALL
def test_a_path_that_is_the_end_of_another(record, tmp_path):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.block = nn.Linear(128, 128), Net()

        def forward(self, x):
            return self.block(self.down(x))

    model = fa.big.quantize(made(Nested), attrs.evolve(record, skip=("down", "*.lm_head"))).eval()
    assert sorted(fa.big.quantized_layers(model)) == ["block.down", "block.up"]
    folder = fa.big.save_quantized(tmp_path / "saved", model)
    again = empty(Nested).eval()
    fa.big.load(again, folder, quantization=fa.big.quantization_of(folder))
    assert sorted(fa.big.quantized_layers(again)) == ["block.down", "block.up"]
    x = made(lambda: torch.randn(2, 128))
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


class Twice(nn.Module):
    """One layer at two paths."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(128, 128)
        self.b, self.c = self.a, nn.Linear(128, 8)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


@ALL
@pytest.mark.parametrize("quantized", [True, False], ids=["codes", "full"])
def test_a_layer_at_two_paths(record, quantized, tmp_path):
    expected = fa.big.quantize(made(Twice), record).eval()
    folder = tmp_path / "saved"
    if quantized:
        fa.big.save_quantized(folder, expected)
        record = fa.big.quantization_of(folder)
    else:
        folder.mkdir()
        safetensors.torch.save_model(made(Twice), folder / "model.safetensors")
    model = empty(Twice).eval()
    fa.big.load(model, folder, quantization=record)
    assert model.a is model.b
    x = made(lambda: torch.randn(2, 128))
    with torch.no_grad():
        assert torch.equal(model(x), expected(x))


def test_codes_of_another_record_are_an_error():
    values = fa.big.quantize(made(), fa.big.Nf4()).state_dict()
    with pytest.raises(RuntimeError, match="nested_blocksize is None, and this layer has 256"):
        fa.big.quantize(made(), fa.big.Nf4(double=True)).load_state_dict(values)


def test_mistakes():
    with pytest.raises(ArgumentError, match="a dict is no module"):
        fa.big.quantize({"a": 1}, fa.big.Nf4())
    model = nn.Sequential(nn.Linear(4, 5))
    model[0].weight = nn.Parameter(torch.empty(5, 0))
    with pytest.raises(ArgumentError, match="not 0: it has no weights"):
        fa.big.quantize(model, fa.big.Int8Weights())
    with pytest.raises(ArgumentError, match="skip=3"):
        fa.big.Nf4(skip=3)
    with pytest.raises(ArgumentError, match="threshold='a'"):
        fa.big.Int8(threshold="a")


def test_a_model_that_is_dispatched(tmp_path):
    model = made().requires_grad_(False)
    fa.big.dispatch(model, "disk", folder=tmp_path)
    with pytest.raises(OwnershipError, match="is dispatched already"):
        fa.big.quantize(model, fa.big.Nf4())


def test_configurations_by_hand():
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    content = {"quantization_config": section | {"bnb_4bit_compute_dtype": "torch.bfloat16"}}
    assert fa.big.quantization_of(content).compute is torch.bfloat16
    with pytest.raises(CheckpointError, match="bnb_4bit_compute_dtype is 'wide'"):
        fa.big.quantization_of({"quantization_config": section | {"bnb_4bit_compute_dtype": "wide"}})
    with pytest.raises(CheckpointError, match="quantization_config is a list"):
        fa.big.quantization_of({"quantization_config": [1]})
