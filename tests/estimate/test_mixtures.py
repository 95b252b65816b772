"""Mixtures of experts, whose grouped products torch traces in bf16 alone, and the operations of attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fnaccel as fa
from tests.estimate.models import VOCABULARY, peak_of, tokens_of

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 24,
}  # fmt: skip


def mixtral():
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def qwen():
    config = transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=192)
    return transformers.Qwen3MoeForCausalLM(config)


def loss_fn(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def estimated(model, strategy="local", ranks=1, step=loss_fn, batch=None):
    return fa.estimate.training(
        step,
        model=fa.distribute(model, strategy),
        optimizer=fa.adamw(1e-3),
        batch=tokens_of("meta") if batch is None else batch,
        ranks=ranks,
    )


@pytest.mark.long
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("model", [mixtral, qwen])
def test_a_mixture_holds_what_is_estimated(pools, model, precision):
    step = loss_fn if precision is None else fa.with_precision(loss_fn, precision)
    held = pools.run(1, peak_of, step, model, "local", fa.adamw(1e-3))[0]
    assert estimated(model, step=step).total == pytest.approx(held, rel=0.1)


@pytest.mark.parametrize("model", [mixtral, qwen])
def test_a_mixture_over_ranks(pools, model):
    """More ranks than experts, over which another dimension is sharded."""
    assert estimated(model, "fsdp", 8).total < estimated(model, "fsdp", 2).total


def test_operations_of_a_mixture_are_counted():
    """Each token meets two experts of two matrices pairs, forward and backward."""
    tokens = tokens_of("meta").numel()
    experts = 2 * tokens * 2 * (96 * 2 * 192 + 192 * 96) * 2
    few, more = estimated(mixtral).work.flops, estimated(lambda: _wide(2)).work.flops
    assert more - few == pytest.approx(3 * experts, rel=0.01)


def _wide(times):
    config = transformers.MixtralConfig(**SIZES | {"intermediate_size": 192 * times}, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).sum()


@pytest.mark.parametrize("length", [32, 512])
def test_operations_of_attention_are_counted(length):
    """Two products forward, five backward, for each of two heads of 8."""
    batch = torch.zeros(3, length, 16, device="meta")
    step = lambda model, x: model(x)  # noqa: E731
    flops = estimated(Attention, step=step, batch=batch).work.flops
    product = 2 * 3 * 2 * length * length * 8
    projection = 2 * 3 * length * 16 * 48
    assert flops == 7 * product + 2 * projection
    with FlopCounterMode(display=False) as counter:
        Attention()(torch.ones(3, length, 16)).backward()
    assert counter.get_total_flops() == flops
    with fa.start():
        train_step = fa.train_step(step, model=fa.distribute(Attention, "local"), optimizer=fa.sgd(0.1))
        state = train_step.init(seed=0)
        row = train_step.flops(state, torch.ones(3, length, 16))  # backward counted as twice the forward
        assert row == 3 * (2 * product + projection) / 3
