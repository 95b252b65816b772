"""Whole tensors where sharded ones are meant: `fa.tree.laid_out`, tree arithmetic, GRADS functions, `perturb`."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from fnaccel.world.world import current
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params

WAYS = [("local", 1), ("ddp", 2), ("fsdp", 2)]


def noise_of(values):
    """Whole tensors, equal on all ranks."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype)
        for name, value in values.items()
    }


def halves(grads, own, info):
    """A GRADS function that returns whole gradients."""
    noise = noise_of(grads)
    return {name: 0.5 * fa.tree.whole(grad) + noise[name] for name, grad in grads.items()}, own


STEPS = {
    "GRADS": lambda: fa.Transform("halves", fa.Phase.GRADS, apply=halves)(loss_fn),
    "perturb": lambda: fa.perturb(loss_fn, lambda grads, info: noise_of(grads)),
    "arithmetic": lambda: fa.Transform(
        "mixed",
        fa.Phase.GRADS,
        apply=lambda grads, own, info: (fa.tree.axpy(0.3, noise_of(grads), grads), own),
    )(loss_fn),
    "lerp": lambda: fa.Transform(
        "mixed",
        fa.Phase.GRADS,
        apply=lambda grads, own, info: (fa.tree.lerp(grads, noise_of(grads), 0.3), own),
    )(loss_fn),
}


def double():
    """In float64: large noise saturates the layers, and three updates make rounding a hundred times larger."""
    return Net().double()


def trained(strategy, which):
    train_step = program(STEPS[which](), strategy=strategy, model=double)
    state = train_step.init(seed=0)
    rank, size = current().rank, 8 // current().size
    for number in range(3):
        rows = [part.double()[rank * size : (rank + 1) * size] for part in batch_of(8, number)]
        state, _ = train_step(state, tuple(rows))
    return whole_params(state)


@pytest.mark.parametrize("which", STEPS)
def test_whole_values_train_as_sharded_ones(pools, which):
    (expected,) = pools.run(1, trained, "local", which)
    assert not fa.tree.allclose(expected, pools.run(1, trained, "local", "GRADS")[0]) or which == "GRADS"
    for strategy, ranks in WAYS[1:]:
        for found in pools.run(ranks, trained, strategy, which):
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def there_and_back(strategy):
    state = program(strategy=strategy).init(seed=0)
    noise = noise_of(state.params)
    placed = fa.tree.laid_out(noise, like=state.params)
    again = fa.tree.laid_out(placed, like=state.params)
    kinds = [type(value) is type(state.params[name].detach()) for name, value in placed.items()]
    equal = [torch.equal(fa.tree.whole(again[name]), noise[name]) for name in noise]
    dots = [float(fa.tree.dot(*pair)) for pair in ((noise, state.params), (state.params, placed))]
    with pytest.raises(errors.ArgumentError, match="two tensors have the shapes"):
        fa.tree.laid_out({name: value[:1] for name, value in noise.items()}, like=state.params)
    with pytest.raises(ValueError, match=r"inp\.bias is (missing|unknown)"):
        fa.tree.laid_out(noise, like={n: v for n, v in state.params.items() if n != "inp.bias"})
    with pytest.raises(errors.ArgumentError, match="a leaf is float"):
        fa.tree.laid_out(dict.fromkeys(noise, 1.0), like=state.params)
    return all(kinds), all(equal), dots[0] == pytest.approx(dots[1], rel=1e-6)


@pytest.mark.parametrize(("strategy", "ranks"), WAYS)
def test_whole_values_go_into_a_layout_and_back(pools, strategy, ranks):
    assert pools.run(ranks, there_and_back, strategy) == [(True,) * 3] * ranks
