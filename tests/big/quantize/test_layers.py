"""Quantized layers: the bits of bitsandbytes, forward and backward, from values and from files."""

from __future__ import annotations

import copy
import pickle

import bitsandbytes
import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.big.quantize.filling import fill, quantized_owner, stored_owner
from fnaccel.errors import ArgumentError
from tests.big.quantize.models import BITSANDBYTES, RECORDS, Net, empty, gpt2, llama, made, same

LIBRARY = pytest.mark.parametrize("record", BITSANDBYTES, ids=str)
ALL = pytest.mark.parametrize("record", RECORDS, ids=str)


def reference(layer, record):
    """The layer of bitsandbytes itself."""
    layer = copy.deepcopy(layer)
    sizes = layer.in_features, layer.out_features
    if record.bits == 4:
        made = bitsandbytes.nn.Linear4bit(*sizes, bias=layer.bias is not None)
        options = {"compress_statistics": record.double, "quant_type": record.kind, "blocksize": record.block}
        made.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, **options)
    else:
        options = {"bias": layer.bias is not None, "has_fp16_weights": False, "threshold": record.threshold}
        made = bitsandbytes.nn.Linear8bitLt(*sizes, **options)
        made.weight = bitsandbytes.nn.Int8Params(layer.weight.data, requires_grad=False)
    made.bias = layer.bias
    made.weight = made.weight.to("cpu")  # here it quantizes
    return made


@LIBRARY
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_layer_computes_the_bits_of_bitsandbytes(record, dtype, train):
    layer = made(lambda: nn.Linear(48, 40)).to(dtype)
    theirs = reference(layer, record).train(train)
    ours = fa.big.quantize(layer, record).train(train)
    outs = []
    for tested in (ours, theirs):
        x = made(lambda: torch.randn(3, 5, 48)).to(dtype).requires_grad_()
        out = tested(x)
        outs.append((out.detach(), *torch.autograd.grad(out.square().sum(), x)))
    assert outs[0][0].dtype is dtype
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])


@LIBRARY
def test_a_state_dict_is_that_of_bitsandbytes_and_loads_back(record):
    layer = made(lambda: nn.Linear(48, 40))
    theirs = reference(layer, record).state_dict()
    ours = fa.big.quantize(layer, record)
    assert same(dict(sorted(ours.state_dict().items())), dict(sorted(theirs.items())))
    again = fa.big.quantize(nn.Linear(48, 40), record)
    assert again.load_state_dict(theirs).missing_keys == []
    assert same(again.state_dict(), ours.state_dict())
    full = fa.big.quantize(nn.Linear(48, 40), record)
    full.load_state_dict(made(lambda: nn.Linear(48, 40)).state_dict())  # full width is quantized
    assert same(full.state_dict(), ours.state_dict())


@ALL
@pytest.mark.parametrize("kind", [Net, llama, gpt2], ids=["plain", "llama", "gpt2"])
def test_an_empty_model_fills_from_full_width_and_from_codes(record, kind):
    if kind is gpt2 and record not in BITSANDBYTES:
        with pytest.raises(ArgumentError, match=r"nn\.Linear only"):  # all its layers are Conv1D
            fa.big.quantize(kind(), record)
        return
    full = made(kind)
    values = copy.deepcopy(full).state_dict()
    quantized = fa.big.quantize(full, record)
    codes = quantized.state_dict()
    assert len(codes) > len(values)
    for source in (values, codes):
        model = fa.big.quantize(empty(kind), record)
        layers = fa.big.quantized_layers(model)
        assert all(layer.missing() for layer in layers.values())
        for name, tensor in source.items():
            owner = stored_owner(model, name)
            if owner is None:
                assert quantized_owner(model, name) is None
                path, _, last = name.rpartition(".")
                param = nn.Parameter(tensor.clone(), requires_grad=False)
                setattr(model.get_submodule(path), last, param)
                continue
            layer, suffix = owner
            shape, dtype = layer.stored_shapes()[suffix] if source is codes else (layer.full_shape, None)
            assert shape in (None, tuple(tensor.shape))
            assert dtype in (None, tensor.dtype)
            fill(layer, suffix, tensor, "cpu")
        assert not any(layer.missing() for layer in layers.values())
        assert same(model.state_dict(), codes)


@ALL
def test_full_width_weights_are_rounded_and_come_back(record):
    full = made()
    weight, bias = full.up.weight.detach().clone(), full.up.bias.detach().clone()
    model = fa.big.quantize(full, record)
    rounded = model.up.full_weight()
    model = fa.big.dequantize(model)
    assert type(model.up) is nn.Linear
    assert torch.equal(model.up.weight, rounded)
    assert torch.equal(model.up.bias, bias)
    error = float((rounded - weight).norm() / weight.norm())
    assert 0 < error < (0.01 if record.bits == 8 else 0.16)
    assert not fa.big.quantized_layers(model)
    again = fa.big.quantize(model, record).up.full_weight()
    # the codes of nf4, fp4 and int8 stay. Scales that are codes, and torchao's 15 steps of 4 bits, move a little
    moves = getattr(record, "double", False) or isinstance(record, fa.big.Int4Weights)
    assert float((again - rounded).norm() / rounded.norm()) < (0.1 if moves else 0.01)


@ALL
def test_values_and_forwards_survive_dtypes_copies_and_pickles(record):
    model = fa.big.quantize(made(), record).eval()
    codes = {name: value.clone() for name, value in model.named_buffers()}
    x = made(lambda: torch.randn(4, 48))
    before = model(x)
    assert same(dict(model.named_buffers()), codes)  # bitsandbytes would have rewritten its codes here
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), before)
        assert other.up.codes.data_ptr() != model.up.codes.data_ptr()
    model.to(torch.bfloat16)
    assert same(dict(model.named_buffers()), codes)
    assert model.norm.weight.dtype is torch.bfloat16


@ALL
def test_codes_are_small_and_nothing_is_left_to_train(record):
    model = fa.big.quantize(made(), record)
    assert sorted(fa.big.quantized_layers(model)) == ["down", "up"]
    held = sum(value.nbytes for value in model.down.buffers())
    full = 48 * 96 * 4
    assert held < full * (0.34 if record.bits == 8 else 0.28)
    assert not any(param.requires_grad for param in model.parameters())
    if record in BITSANDBYTES:  # peft asks
        assert model.is_loaded_in_8bit if record.bits == 8 else model.is_loaded_in_4bit


@LIBRARY
def test_peft_sees_the_layer_of_bitsandbytes_and_merges(record):
    peft = pytest.importorskip("peft")
    model = fa.big.quantize(made(), record)
    kind = bitsandbytes.nn.Linear8bitLt if record.bits == 8 else bitsandbytes.nn.Linear4bit
    assert isinstance(model.up, kind)
    assert model.up.weight.data_ptr() == model.up.codes.data_ptr()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up"], init_lora_weights=False))
    layer = adapted.base_model.model.up
    assert type(layer).__name__ == kind.__name__
    before = layer.base_layer.full_weight()
    delta = layer.get_delta_weight("default").detach()
    with pytest.warns(UserWarning, match="rounding errors"):
        layer.merge()
    merged = nn.Linear(48, 96)
    merged.weight = nn.Parameter(before + delta)
    assert float(delta.norm() / before.norm()) > 0.01
    assert torch.equal(layer.base_layer.full_weight(), fa.big.quantize(merged, record).full_weight())
