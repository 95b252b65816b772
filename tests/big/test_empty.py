"""Models without values."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import fnaccel as fa
from tests.big.models import Net


def test_parameters_have_no_values_and_buffers_have():
    with fa.big.empty():
        net = Net()
    assert all(p.is_meta for p in net.parameters())
    assert torch.equal(net.mask, torch.ones(4))
    assert not net.norm.running_mean.is_meta
    assert net.head.weight is net.embed.weight
    assert not Net().embed.weight.is_meta


def test_buffers_by_choice():
    with fa.big.empty(buffers=True):
        net = Net()
        made = torch.empty(2)
    assert all(b.is_meta for b in net.buffers())
    assert made.is_meta


def test_a_parameter_that_is_registered_twice_stays_one():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            weight = nn.Parameter(torch.ones(3), requires_grad=False)
            self.a, self.b = weight, weight
            mask = torch.ones(2)
            self.register_buffer("c", mask)
            self.register_buffer("d", mask, persistent=False)

    with fa.big.empty(buffers=True):
        twice = Twice()
    assert twice.a is twice.b
    assert twice.a.is_meta
    assert not twice.a.requires_grad
    assert twice.c is twice.d
    assert list(twice.state_dict()) == ["a", "b", "c"]


@pytest.mark.parametrize("buffers", [False, True])
def test_other_threads_build_as_before(buffers):
    methods = nn.Module.register_parameter, nn.Module.register_buffer
    with ThreadPoolExecutor(1) as pool, fa.big.empty(buffers=buffers):
        other = pool.submit(Net).result()
        net = Net()
    assert not any(t.is_meta for t in [*other.parameters(), *other.buffers()])
    assert all(p.is_meta for p in net.parameters())
    assert methods == (nn.Module.register_parameter, nn.Module.register_buffer)


def test_two_threads_that_leave_in_any_order():
    methods = nn.Module.register_parameter, nn.Module.register_buffer
    with ThreadPoolExecutor(1) as pool:
        first, second = contextlib.ExitStack(), contextlib.ExitStack()
        first.enter_context(fa.big.empty())
        pool.submit(second.enter_context, fa.big.empty()).result()
        first.close()
        assert not Net().embed.weight.is_meta
        assert pool.submit(Net).result().embed.weight.is_meta
        pool.submit(second.close).result()
        assert not pool.submit(Net).result().embed.weight.is_meta
    assert methods == (nn.Module.register_parameter, nn.Module.register_buffer)


def test_on_a_device():
    with fa.big.on("meta"):
        net = Net()
    assert all(t.is_meta for t in [*net.parameters(), *net.buffers()])
    with fa.big.on("cpu"):
        assert torch.equal(Net().mask, torch.ones(4))


def test_a_model_of_a_terabyte():
    with fa.big.empty():
        model = nn.Sequential(*(nn.Linear(100_000, 100_000) for _ in range(26)))
    assert fa.big.sizes(model).total > 10**12
    placed = fa.big.device_map(model, {0: "80GiB", "cpu": "500GiB"})
    assert placed.devices == (0, "cpu", "disk")


def test_models_of_transformers():
    import transformers

    with fa.big.empty():
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(num_hidden_layers=80, hidden_size=8192)
        )
    assert fa.big.sizes(model, "bf16").largest == (
        "model.layers.0",
        2 * (4 * 8192**2 + 3 * 8192 * 11008 + 2 * 8192),
    )
    assert not model.model.rotary_emb.inv_freq.is_meta
    assert all(p.is_meta for p in model.parameters())
