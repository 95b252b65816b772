"""Integer weights: the bits of torchao forward, a gradient without full-width copies, codes two in a byte."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fnaccel as fa
from fnaccel.big.quantize.torchao import config_of, packed, unpacked
from fnaccel.errors import ArgumentError
from tests.big.quantize.models import TORCHAO, Net, llama, made

ALL = pytest.mark.parametrize("record", TORCHAO, ids=str)


def reference(layer, record):
    from torchao.quantization import quantize_

    holder = nn.Sequential(copy.deepcopy(layer))
    quantize_(holder, config_of(record))
    return holder[0]


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_layer_computes_the_bits_of_torchao(record, dtype):
    layer = made(lambda: nn.Linear(48, 40)).to(dtype)
    theirs, ours = reference(layer, record), fa.big.quantize(layer, record)
    assert type(ours.weight) is type(theirs.weight)
    for name, suffix in (
        ("qdata", "_weight_qdata"),
        ("scale", "_weight_scale"),
        ("zero_point", "_weight_zero_point"),
    ):
        assert torch.equal(getattr(theirs.weight, name), ours.stored()[suffix])
    assert torch.equal(theirs.weight.dequantize(), ours.full_weight())
    ours.bias.requires_grad_(True)
    outs = []
    for tested in (ours, theirs):
        x = made(lambda: torch.randn(3, 5, 48)).to(dtype).requires_grad_()
        out = tested(x)
        outs.append((out.detach(), *torch.autograd.grad(out.square().sum(), (x, tested.bias))))
    assert outs[0][0].dtype is dtype
    assert torch.equal(outs[0][0], outs[1][0])
    for ours_, theirs_ in zip(outs[0][1:], outs[1][1:], strict=True):
        assert ours_.dtype is dtype
        error = float((ours_ - theirs_).norm() / theirs_.norm())
        assert error < (1e-2 if dtype is torch.bfloat16 else 1e-6)


@ALL
def test_nothing_in_full_width_is_kept_for_backward(record):
    layer = made(lambda: nn.Linear(48, 40))

    def saved_by(tested):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            tested(torch.randn(2, 48, requires_grad=True))
        return sizes

    theirs, ours = reference(layer, record), fa.big.quantize(layer, record)
    assert 48 * 40 in saved_by(theirs)
    assert set(saved_by(ours)) == {ours.codes.numel(), ours.scales.numel()}


@given(st.integers(0, 40), st.randoms(use_true_random=False))
def test_codes_are_packed_two_in_a_byte(count, random):
    codes = torch.tensor([random.randint(-8, 7) for _ in range(count)], dtype=torch.int8)
    assert packed(codes).shape == ((count + 1) // 2,)
    assert torch.equal(unpacked(packed(codes), (count,)), codes)


def test_layers_that_do_not_fit_are_left_with_the_reason():
    layers = fa.big.chosen_layers(Net(), fa.big.Int8Weights(group=96))
    assert layers.converted == ("down",)
    assert layers.skipped["up"] == "its 48 inputs are no multiple of group=96"
    assert len(fa.big.chosen_layers(llama(), fa.big.Int4Weights()).converted) == 14
    with pytest.raises(ArgumentError, match="no layer of this Net can be quantized: not up: its 48"):
        fa.big.quantize(Net(), fa.big.Int4Weights(group=64))
    for group in (0, -1, 1.5):
        with pytest.raises(ArgumentError, match="group is 1 or more"):
            fa.big.Int4Weights(group=group)
