"""A GRADS function may return its gradients in another layout of the same tensors."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from tests.strategies.tensor.models import GPT, PLAN, loss_fn, rows_of
from tests.tiny_models import whole_params


def centralise(grads, own, info):
    """Gradient centralisation (arXiv:2004.01461): of a tensor sharded along dim 1 a mean is a partial sum."""
    return {n: g - g.mean(dim=1, keepdim=True) if g.dim() == 2 else g for n, g in grads.items()}, own


def centralised(strategy):
    step = fa.Transform("centralise", fa.Phase.GRADS, apply=centralise)(loss_fn)
    train_step = fa.train_step(step, model=fa.distribute(GPT, strategy), optimizer=fa.sgd(0.3))
    state = train_step.init(seed=0)
    for number in range(3):
        state, _ = train_step(state, rows_of(number, train_step.mesh.batch_rank))
    out = whole_params(state)
    train_step.close()
    return out


@pytest.mark.parametrize(("strategy", "ranks"), [(fa.tensor(2, PLAN), 2), ("fsdp", 1)])
def test_a_mean_over_a_sharded_dimension_is_that_of_the_whole_gradient(pools, strategy, ranks):
    (expected,) = pools.run(1, centralised, "local")
    for params in pools.run(ranks, centralised, strategy):
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value, rtol=1e-4, atol=1e-6)
