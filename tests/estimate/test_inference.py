"""Estimates of inference against the live storages of a forward pass."""

from __future__ import annotations

import pytest
import torch
import transformers

import fnaccel as fa
from fnaccel import errors
from fnaccel.estimate import LiveStorages


def llama_of(**options):
    return transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=300, hidden_size=64, intermediate_size=160,
        num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, **options,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_forward_pass_and_its_cache(tmp_path, dtype):
    llama_of().save_pretrained(tmp_path)
    rows, length = 3, 100
    estimate = fa.estimate.inference(
        fa.estimate.find_model(str(tmp_path)), rows=rows, length=length, dtype=dtype
    )
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = transformers.LlamaForCausalLM(llama_of()).to(kind).eval()
    tokens = torch.zeros(rows, length, dtype=torch.long)
    with LiveStorages() as storages, torch.no_grad():
        storages.leave_out([tokens, *model.parameters(), *model.buffers()])
        cache = model(input_ids=tokens, use_cache=True, logits_to_keep=1).past_key_values
        assert storages.live == pytest.approx(estimate.cache, rel=0.01)
    assert cache is not None
    assert estimate.cache == 2 * 7 * 2 * 16 * rows * length * kind.itemsize
    assert storages.peak == pytest.approx(estimate.cache + estimate.activations, rel=0.05)
    held = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert estimate.parameters == pytest.approx(held, rel=0.01)


def test_quantized_parameters(tmp_path):
    llama_of().save_pretrained(tmp_path)
    model = fa.estimate.find_model(str(tmp_path))
    wide, small = (fa.estimate.inference(model, length=100, dtype=dtype) for dtype in ("bf16", "int4"))
    assert small.parameters * 4 == pytest.approx(wide.parameters, rel=0.01)
    assert (small.cache, small.activations) == (wide.cache, wide.activations)


def test_a_model_whose_batches_are_unknown():
    with pytest.raises(errors.ArgumentError, match="nothing is known of the batches"):
        fa.estimate.inference(fa.estimate.find_model("torch.nn:Identity"))
