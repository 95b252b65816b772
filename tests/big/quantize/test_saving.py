"""Quantized files: what is written is read back bit for bit, by us and by transformers, and both ways.

transformers has no option for the size of blocks: it reads any.
"""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.errors import ArgumentError, CapabilityError, CheckpointError
from tests.big.quantize.models import BITSANDBYTES, RECORDS, Net, empty, gpt2, llama, made, same, stream

IDS = torch.arange(24).reshape(2, 12) % 128
CASES = [(llama, record) for record in RECORDS] + [(gpt2, record) for record in BITSANDBYTES]
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


@torch.no_grad()
def logits(model):
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # else transformers' layers compute in bf16 here
    return model(IDS).logits


@pytest.mark.long_except(r"60KB")
@pytest.mark.parametrize(("kind", "record"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("size", ["5GB", "60KB"])
def test_a_round_trip_is_exact_and_transformers_reads_it(tmp_path, kind, record, size):
    from transformers import AutoModelForCausalLM

    model = fa.big.quantize(kind(), record)
    folder = fa.big.save_quantized(tmp_path / "a", model, max_shard_size=size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (size == "60KB")
    found = fa.big.quantization_of(folder)
    assert (found.name, found.bits) == (record.name, record.bits)

    again = stream(fa.big.quantize(empty(kind), found), folder)
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert torch.equal(logits(again), logits(model))

    second = fa.big.save_quantized(tmp_path / "b", again, max_shard_size=size)
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert all((folder / name).read_bytes() == (second / name).read_bytes() for name in names)

    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    values = theirs.state_dict()
    if record in BITSANDBYTES:
        assert sorted(values) == sorted(model.state_dict())
        for name, value in model.state_dict().items():
            assert torch.equal(values[name], value), name
    assert torch.equal(logits(theirs), logits(model))


@pytest.mark.parametrize("record", [r for r in BITSANDBYTES if getattr(r, "block", 64) == 64], ids=str)
def test_what_transformers_quantized_and_saved_is_read(tmp_path, record):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options = (
        {"load_in_8bit": True, "llm_int8_threshold": record.threshold}
        if record.bits == 8
        else {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": record.kind,
            "bnb_4bit_use_double_quant": record.double,
        }
    )
    llama().save_pretrained(tmp_path / "full")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "full", quantization_config=BitsAndBytesConfig(**options)
    )
    theirs.save_pretrained(tmp_path / "small")
    found = fa.big.quantization_of(tmp_path / "small")
    model = stream(fa.big.quantize(empty(llama), found), tmp_path / "small")
    full = stream(fa.big.quantize(empty(llama), found), tmp_path / "full")
    assert same(dict(model.state_dict()), dict(full.state_dict()))
    assert torch.equal(logits(model), logits(theirs))


def test_config_has_the_keys_of_transformers(tmp_path):
    model = fa.big.quantize(llama().to(torch.bfloat16), fa.big.Nf4(double=True, skip="*.q_proj"))
    folder = fa.big.save_quantized(tmp_path / "a", model)
    written = json.loads((folder / "config.json").read_text())
    assert written["model_type"] == "llama"
    assert written["quantization_config"] == {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"],
        "fnaccel": {"block": 64, "compute": None},
    }
    assert fa.big.quantization_of(folder).compute is None
    again = stream(
        fa.big.quantize(empty(lambda: llama().to(torch.bfloat16)), fa.big.quantization_of(folder)), folder
    )
    assert set(fa.big.quantized_layers(again)) == set(fa.big.quantized_layers(model))


def test_configs_of_others():
    config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
    found = fa.big.quantization_of({"quantization_config": config})
    assert found == fa.big.Nf4(compute="bf16")
    assert fa.big.quantization_of({"model_type": "llama"}) is None
    skipping = {"quantization_config": {**config, "llm_int8_skip_modules": ["lm_head", "vision_tower"]}}
    layers = fa.big.chosen_layers(Net(), fa.big.quantization_of(skipping))  # no error: Net has no tower
    assert layers.skipped == {"lm_head": "skip='lm_head'"}
    for wrong in (
        {"quant_method": "gptq"},
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}},
        {**config, "bnb_4bit_quant_storage": "bfloat16"},
        {**config, "bnb_4bit_quant_type": "nf5"},
    ):
        with pytest.raises(CheckpointError, match="quantization_config"):
            fa.big.quantization_of({"quantization_config": wrong})
    with pytest.raises(CheckpointError, match="can't be read"):
        fa.big.quantization_of("nowhere")


def test_a_plain_module_and_a_live_state_are_saved(tmp_path):
    model = fa.big.quantize(made(), fa.big.Int8())
    first = fa.big.save_quantized(tmp_path / "a", model)

    def loss_fn(model, rows):
        return fa.Mean(model(rows).square().sum(), weight=len(rows))

    with fa.start():
        model.lm_head.requires_grad_(True)
        distributed = fa.distribute(model, fa.local())
        train_step = fa.train_step(loss_fn, model=distributed, optimizer=fa.sgd(0.0))
        state, _ = train_step(train_step.init(seed=0), torch.ones(2, 128))
        second = fa.big.save_quantized(tmp_path / "b", state)
        with pytest.raises(ArgumentError, match=r"are codes, such as up\.codes"):
            fa.interchange.export_hf(tmp_path / "c", state)
    for name in ("model.safetensors", "config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    again = stream(fa.big.quantize(empty(), fa.big.quantization_of(first)), first)
    assert same(dict(again.state_dict()), dict(model.state_dict()))


def test_a_layer_under_two_names_is_written_once(tmp_path):
    model = made()
    model.second = model.up
    folder = fa.big.save_quantized(tmp_path / "a", fa.big.quantize(model, fa.big.Nf4()))
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if name.startswith("second.")]  # noqa: SIM118


def test_what_can_not_be_saved_raises(tmp_path):
    peft = pytest.importorskip("peft")
    quantized = fa.big.quantize(Net(), fa.big.Nf4())
    cases = (
        (ArgumentError, Net(), "no layer of this Net is quantized"),
        (ArgumentError, "model", "source is a str"),
        (CapabilityError, fa.big.quantize(empty(), fa.big.Nf4()), "has no values yet"),
        (ArgumentError, peft.get_peft_model(quantized, peft.LoraConfig(target_modules=["up"])), "adapter"),
    )
    for kind, source, text in cases:
        with pytest.raises(kind, match=text):
            fa.big.save_quantized(tmp_path / "a", source)
        assert list(tmp_path.iterdir()) == []
    both = nn.ModuleList([fa.big.quantize(Net(), record) for record in (fa.big.Nf4(), fa.big.Int8())])
    with pytest.raises(ArgumentError, match="2 records"):
        fa.big.save_quantized(tmp_path / "a", both)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CheckpointError, match="not empty"):
        fa.big.save_quantized(tmp_path / "full", fa.big.quantize(Net(), fa.big.Nf4()))
