"""What a transform keeps of gradients and parameters stays as it was: their memory is written again."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel.errors import ArgumentError, StaleStateError
from fnaccel.extend import Optimizer
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params


def difference(grads, own, info):
    """Train by the change of the gradient: it keeps the gradients that it was given."""
    changed = {name: grad - own["grads"][name] for name, grad in grads.items()}
    return changed, {"grads": dict(grads), "params": dict(info.params)}


def first(params):
    zeros = {name: torch.zeros_like(value) for name, value in params.items()}
    return {"grads": zeros, "params": {name: value.detach().clone() for name, value in params.items()}}


def trained(strategy, ranks):
    step = fa.Transform("difference", fa.Phase.GRADS, apply=difference, init=first)(loss_fn)
    train_step = program(step, strategy=strategy, model=Net)
    state = train_step.init(seed=0)
    rank = train_step.mesh.batch_rank
    before = None
    for call in range(3):
        x, y = batch_of(8, call)
        before = whole_params(state)
        state, _ = train_step(state, (x[rank::ranks], y[rank::ranks]))
    kept = {name: fa.tree.whole(value) for name, value in state.transforms["difference"]["params"].items()}
    return whole_params(state), all(torch.equal(kept[name], value) for name, value in before.items())


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_kept_gradients_are_those_of_the_step(pools, strategy, ranks):
    expected, _ = pools.run(1, trained, "local", 1)[0]
    for params, kept in pools.run(ranks, trained, strategy, ranks):
        assert fa.tree.allclose(params, expected, rtol=1e-5, atol=1e-6)
        assert kept


class RawSlots:
    reads_host = False

    def __init__(self, groups):
        members = [m for group in groups for m in group.members]
        self.slots = {m.leaf.name: {"m": torch.zeros_like(m.leaf.shard)} for m in members}

    def apply(self, grads, rates, multiplier, skip, updates):
        pass


class RawKernel:
    def bind(self, groups):
        return RawSlots(groups)


def bound(strategy):
    optimizer = Optimizer(name="raw", lr=0.1, options=(), kernel=RawKernel())
    try:
        program(loss_fn, strategy=strategy, optimizer=optimizer).init(seed=0)
    except ArgumentError as error:
        return str(error)
    return "bound"


def test_a_slot_that_would_be_saved_as_one_ranks_part_is_refused(pools):
    assert pools.run(2, bound, "ddp") == ["bound", "bound"]
    for text in pools.run(2, bound, "fsdp"):
        assert "the slot 'm' of" in text
        assert "leaf.like(part)" in text


def drawn(strategy):
    def apply(grads, own, info):
        return grads, own

    def start(params):
        return {"x": torch.randn(3)}

    step = fa.Transform("drawn", fa.Phase.GRADS, apply=apply, init=start)(loss_fn)
    train_step = program(step, strategy=strategy)
    torch.manual_seed(train_step.mesh.world.rank)  # whatever the script has drawn before
    return [train_step.init(seed=seed).transforms["drawn"]["x"].tolist() for seed in (0, 1, 0)]


def test_what_a_first_state_draws_follows_the_seed_of_init(pools):
    (expected,) = pools.run(1, drawn, "local")
    assert expected[0] == expected[2] != expected[1]
    assert pools.run(2, drawn, "ddp") == [expected, expected]


def test_whole_takes_a_leaf():
    with pytest.raises(TypeError, match=r"fa\.tree\.map"):
        fa.tree.whole({"a": torch.ones(2)})


def mixed():
    def apply(grads, own, info):
        return {name: grad + torch.ones(grad.shape) for name, grad in grads.items()}, own

    train_step = program(fa.Transform("mixed", fa.Phase.GRADS, apply=apply)(loss_fn), strategy="fsdp")
    try:
        train_step(train_step.init(seed=0), batch_of(4))
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_an_error_of_a_hook_does_not_blame_the_loss(pools):
    for name, text in pools.run(2, mixed):
        assert name == "RuntimeError"
        assert "mixed torch.Tensor and DTensor" in text


def of_kept(fresh, scope, looks):
    """Losses of a loss that keeps the parameters of its first call, beside those of each call or alone."""
    kept = []

    def loss(model, batch):
        x, y = batch
        if not kept:
            kept.append(fa.params(model))
        total = (fa.call(model, fa.params(model) if looks else kept[0], x) - y).square().sum()
        return fa.Mean(total + ((model(x) - y).square().sum() if fresh else 0.0), weight=len(y))

    step = loss if scope is None else fa.compile(loss, scope, backend="eager")
    train_step = program(step, strategy="fsdp")
    state, losses = train_step.init(seed=0), []
    for call in range(3):
        state, metrics = train_step(state, batch_of(4, call))
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize(("fresh", "scope"), [(True, None), (False, None), (False, "step")])
def test_parameters_of_an_earlier_update_raise_in_shards(pools, fresh, scope):
    with pytest.raises(StaleStateError, match=r"fa\.params gave in an earlier"):
        pools.run(2, of_kept, fresh, scope, False)


def test_parameters_may_be_kept_that_no_loss_uses(pools):
    assert len(pools.run(2, of_kept, True, None, True)[0]) == 3
