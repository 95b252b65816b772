"""Which layers are quantized: patterns, heads, ties, kinds. And what raises, with its fix."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.errors import (
    ArgumentError,
    CapabilityError,
    CheckpointError,
    MissingBackendError,
    UnknownNameError,
    install_line,
)
from tests.big.quantize.models import Net, empty, gpt2, llama, made

Nf4, Int8 = fa.big.Nf4, fa.big.Int8


def chosen(module, record):
    layers = fa.big.chosen_layers(module, record)
    assert set(layers.converted).isdisjoint(layers.skipped)
    return layers


def test_heads_are_left_unless_patterns_are_given():
    assert chosen(Net(), Nf4()).converted == ("up", "down")
    assert chosen(Net(), Nf4()).skipped == {"lm_head": "the output head"}
    assert chosen(Net(), Nf4(skip=())).converted == ("up", "down", "lm_head")
    assert chosen(Net(), Nf4(skip=("up", "lm_*"))).converted == ("down",)
    model = llama()
    assert "lm_head" in chosen(model, Int8()).skipped
    assert len(chosen(model, Int8()).converted) == 14
    assert chosen(model, Int8()).describe()[1:] == ["not lm_head: the output head"]


def test_a_pattern_of_a_module_covers_what_is_below_it():
    model = llama()
    layers = chosen(model, Nf4(skip=("model.layers.0", "*.down_proj.weight")))
    assert not any(path.startswith("model.layers.0.") for path in layers.converted)
    assert layers.skipped["model.layers.1.mlp.down_proj"] == "skip='*.down_proj.weight'"
    assert "model.layers.1.mlp.up_proj" in layers.converted


def test_keep_stores_in_fp32():
    model = llama().to(torch.bfloat16)
    assert "model.layers.1.mlp.up_proj" in chosen(model, Nf4(keep="*.mlp")).skipped
    quantized = fa.big.quantize(model, Nf4(keep=("*.mlp", "*norm*")))
    assert sorted({str(p.dtype) for p in quantized.parameters()}) == ["torch.bfloat16", "torch.float32"]
    assert quantized.model.layers[0].mlp.up_proj.weight.dtype is torch.float32
    assert quantized.model.norm.weight.dtype is torch.float32
    assert quantized.model.embed_tokens.weight.dtype is torch.bfloat16
    assert quantized.model.layers[0].self_attn.q_proj.weight_dtype is torch.bfloat16


def test_tied_and_shared_layers():
    assert chosen(gpt2(), Nf4(skip=())).skipped == {"lm_head": "tied to transformer.wte"}
    model = Net()
    model.second = model.up  # one layer under two names
    quantized = fa.big.quantize(model, Nf4())
    assert quantized.second is quantized.up
    assert set(fa.big.quantized_layers(quantized)) == {"up", "second", "down"}
    full = fa.big.dequantize(quantized)
    assert full.second is full.up


def test_layers_whose_weights_others_read_are_left():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 2), "out": nn.Linear(64, 64)})
    assert chosen(model, Nf4()).converted == ("out",)


def test_layers_whose_rows_end_within_a_block_are_left():
    model = nn.ModuleDict({"wide": nn.Linear(128, 8), "narrow": nn.Linear(96, 8)})
    for record in (fa.big.Nf4(skip=()), fa.big.Fp4(skip=())):
        assert chosen(model, record).converted == ("wide",)
        assert chosen(model, record).skipped == {"narrow": "its 96 inputs are no multiple of block=64"}
    assert chosen(model, fa.big.Nf4(block=32)).converted == ("wide", "narrow")
    assert chosen(gpt2(), fa.big.Nf4(block=512)).converted == (
        "transformer.h.0.mlp.c_proj",
        "transformer.h.1.mlp.c_proj",
    )


def test_each_full_width_weight_is_freed_before_the_next(monkeypatch):
    import weakref

    from fnaccel.big.quantize.layer import QuantizedLayer

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive = []
    real = QuantizedLayer.fill

    def counted(layer, suffix, tensor, device):
        alive.append(sum(reference() is not None for reference in weights))
        real(layer, suffix, tensor, device)

    monkeypatch.setattr(QuantizedLayer, "fill", counted)
    fa.big.quantize(model, Nf4())
    assert alive == [4, 3, 2, 1]


RAISES = {
    "pattern of skip": (ArgumentError, lambda: fa.big.quantize(Net(), Nf4(skip="head")), "matches no layer"),
    "pattern of keep": (ArgumentError, lambda: fa.big.quantize(Net(), Nf4(keep="nrm")), "norm"),
    "nothing left": (ArgumentError, lambda: fa.big.quantize(Net(), Nf4(skip="*")), "no layer of this Net"),
    "no linear layer": (ArgumentError, lambda: fa.big.quantize(nn.LayerNorm(4), Nf4()), "no nn.Linear"),
    "twice": (CapabilityError, lambda: fa.big.quantize(fa.big.quantize(Net(), Nf4()), Int8()), "dequantize"),
    "dtype of weights": (CapabilityError, lambda: fa.big.quantize(Net().double(), Nf4()), "float64"),
    "no record": (ArgumentError, lambda: fa.big.quantize(Net(), "nf4"), "fa.big.Nf4()"),
    "block": (ArgumentError, lambda: Nf4(block=48), "one of 32, 64"),
    "compute": (UnknownNameError, lambda: Nf4(compute="bf8"), "bf8"),
    "compute of integers": (ArgumentError, lambda: Nf4(compute=torch.int8), "bf16"),
    "threshold": (ArgumentError, lambda: Int8(threshold=-1), "0 or more"),
    "not quantized": (ArgumentError, lambda: fa.big.dequantize(Net()), "no quantized layer"),
    "without values": (
        CapabilityError,
        lambda: fa.big.dequantize(fa.big.quantize(empty(), Nf4())),
        "up, down",
    ),
}


@pytest.mark.parametrize("case", RAISES)
def test_raises(case):
    kind, call, text = RAISES[case]
    with pytest.raises(kind, match=text.replace("(", r"\(").replace(")", r"\)")) as raised:
        call()
    assert raised.value.where
    assert raised.value.fix


def test_a_failed_call_leaves_the_model_as_it_was():
    model = Net()
    with pytest.raises(ArgumentError, match="matches no layer"):
        fa.big.quantize(model, Nf4(skip="head"))
    assert type(model.up) is nn.Linear
    assert all(param.requires_grad for param in model.parameters())


def test_tensors_that_do_not_fit_raise():
    layer = fa.big.quantize(made(), Nf4()).up
    codes = layer.codes.clone()
    for suffix, tensor, text in (
        ("weight", torch.zeros(128, 256), "in full width"),
        ("weight", torch.zeros(5, 1, dtype=torch.uint8), "[16384, 1]"),
        ("weight.absmax", torch.zeros(512, dtype=torch.uint8), "float32"),
        ("weight.nested_absmax", torch.zeros(1), "no tensor"),
    ):
        with pytest.raises(CheckpointError, match=text.replace("[", r"\[")):
            layer.fill(suffix, tensor, "cpu")
    other = fa.big.quantize(made(), Nf4(block=128)).up.stored()
    with pytest.raises(CheckpointError, match="blocksize is 128, and this layer has 64"):
        layer.fill(
            "weight.quant_state.bitsandbytes__nf4", other["weight.quant_state.bitsandbytes__nf4"], "cpu"
        )
    assert torch.equal(layer.codes, codes)
    with pytest.raises(CheckpointError, match="old GPUs"):
        fa.big.quantize(made(), Int8()).up.fill("weight_format", torch.ones((), dtype=torch.uint8), "cpu")


@pytest.mark.long
def test_without_the_library(monkeypatch):
    code = (
        "import sys; sys.modules['bitsandbytes'] = None\n"
        "import torch, fnaccel as fa\n"
        "try: fa.big.quantize(torch.nn.Linear(64, 64), fa.big.Nf4())\n"
        "except fa.errors.MissingBackendError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert install_line("quantize") in done.stdout
    assert issubclass(MissingBackendError, ImportError)
