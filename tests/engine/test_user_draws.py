"""Noise that a user's functions draw is one whole tensor for each parameter, whatever the layout."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from fnaccel.world.world import current
from tests.tiny_models import batch_of, loss_fn, program, whole_params


def noisy(draw):
    def add(grads, own, info):
        return {name: grad + draw(grad, info) for name, grad in grads.items()}, own

    return fa.Transform("noise", fa.Phase.GRADS, apply=add)(loss_fn)


def by_default(grad, info):
    return torch.randn_like(grad)


def by_generator(grad, info):
    generator = torch.Generator().manual_seed(info.step)
    return torch.empty_like(grad).normal_(generator=generator)


def by_value(grad, info):
    return torch.bernoulli(torch.zeros_like(grad))


DRAWS = {"default": by_default, "generator": by_generator}


def trained(strategy, draw, rng="fold", draws=DRAWS):
    torch.manual_seed(1234 + current().rank)
    train_step = program(noisy(draws[draw]), strategy=strategy, rng=rng)
    state = train_step.init()
    before = torch.random.get_rng_state()
    for step in range(2):
        state, _ = train_step(state, batch_of(6, step))
    assert rng == "stream" or torch.equal(before, torch.random.get_rng_state())
    params = whole_params(state)
    train_step.close()
    return params


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(2, "ddp"), (1, "fsdp"), (2, "fsdp"), (3, "fsdp"), (4, "hsdp(2, 2)")]
)
def test_noise_is_the_same_on_every_layout(pools, draw, ranks, strategy):
    (expected,) = pools.run(1, trained, "local", draw)
    for params in pools.run(ranks, trained, strategy, draw):
        for name, value in params.items():
            assert torch.allclose(value, expected[name], atol=1e-6), name


def in_a_stream(strategy, draw):
    try:
        trained(strategy, draw, rng="stream", draws={**DRAWS, "value": by_value})
    except errors.CapabilityError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_that_would_drift_apart_raise(pools, strategy):
    for message in pools.run(2, in_a_stream, strategy, "default"):
        assert "differs between ranks" in message
    assert pools.run(2, in_a_stream, strategy, "generator") == ["", ""]
    assert pools.run(1, in_a_stream, "local", "default") == [""]


def drawn_by_value():
    with pytest.raises(errors.CapabilityError, match="of a sharded tensor"):
        trained("fsdp", "value", draws={"value": by_value})


def test_a_draw_that_depends_on_values_of_shards_raises(pools):
    pools.run(2, drawn_by_value)
