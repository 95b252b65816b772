"""Losses that call the model with other parameters: right, or an error by name."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.func import functional_call
from torch.nn.utils import stateless

import fnaccel as fa
from fnaccel import errors
from tests.tiny_models import batch_of, loss_fn, program, whole_params


def squares(out, y):
    return fa.Mean((out - y).square().sum(), weight=len(y))


def halved(model, batch, parts=("",)):
    x, y = batch
    given = {name: 0.5 * value for name, value in model.named_parameters() if name.startswith(parts)}
    return squares(functional_call(model, given, (x,)), y)


def halved_root(model, batch):
    return halved(model, batch, ("inp.", "out."))


def adapted(model, batch):
    """MAML with one inner step."""
    x, y = batch
    params = {name: value.detach() for name, value in model.named_parameters()}

    def inner(given):
        return (functional_call(model, given, (x,)) - y).square().mean()

    grads = torch.func.grad(inner)(params)
    fast = {name: value - 0.1 * grads[name] for name, value in model.named_parameters()}
    return squares(functional_call(model, fast, (x,)), y)


def in_a_method(model, batch):
    x, y = batch
    given = {name: 0.5 * value for name, value in model.blocks[0].named_parameters()}
    with stateless._reparametrize_module(model.blocks[0], given):
        out = model.blocks[0].encode(model.inp(x))
    return squares(model.out(model.blocks[1](out)), y)


def own_gradient(model, batch):
    x, y = batch
    total = (model(x) - y).square().sum()
    grads = torch.autograd.grad(total, list(model.parameters()), retain_graph=True)
    return fa.Mean(total + sum(grad.square().sum() for grad in grads).detach(), weight=len(y))


def penalised(model, batch):
    """A gradient penalty: a second derivative through the model."""
    x, y = batch
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (
        squares(out, y)
        if slope is None
        else fa.Mean((out - y).square().sum() + slope.square().sum(), weight=len(y))
    )


def attacked(model, batch):
    """A first derivative with respect to rows, and a forward at the moved ones."""
    x, y = batch
    moved = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad((model(moved) - y).square().sum(), moved)
    return squares(model(x + 0.1 * slope.sign()), y)


def given_itself(model, batch):
    x, y = batch
    return squares(functional_call(model, dict(model.named_parameters()), (x,)), y)


LOSSES = {fn.__name__: fn for fn in (
    halved, halved_root, adapted, in_a_method, own_gradient, penalised, attacked, given_itself, loss_fn,
)}  # fmt: skip


def trained(strategy, name, change=None):
    """Loss and parameters after one update, or the error. The state trains on by another loss."""
    step = LOSSES[name] if change is None else change(LOSSES[name])
    train_step = program(step, strategy=strategy, optimizer=fa.sgd(0.05))
    state = train_step.init(seed=0)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Grad strides")  # of DDP, for a second derivative
            state, metrics = train_step(state, batch_of(4))
    except errors.CapabilityError as error:
        train_step.look(state, lambda model: model(batch_of(4)[0]))  # the engine is as it was
        return str(error)
    return float(metrics["loss"]), whole_params(state)


def same(first, second):
    return abs(first[0] - second[0]) < 1e-6 and fa.tree.allclose(first[1], second[1], rtol=1e-5, atol=1e-7)


STRATEGIES = {
    "ddp": fa.ddp(),
    "fsdp": fa.fsdp(methods=("encode",)),
    "kept": fa.fsdp(reshard_after_forward=False, methods=("encode",)),
    "root": fa.fsdp(units=None),
}
REFUSED = {
    "halved": "inside of 'blocks.0' was replaced",
    "adapted": "inside of 'blocks.0' was replaced",
    "in_a_method": "inside of 'blocks.0' was replaced",
    "own_gradient": "differentiated with respect to parameters",
    "attacked": "after a gradient that it took",
    "penalised": "second derivative through a sharded unit",
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_with_given_parameters_is_right_or_refused(pools, strategy, name):
    (expected,) = pools.run(1, trained, fa.local(), name)
    for found in pools.run(2, trained, STRATEGIES[strategy], name):
        if isinstance(found, str):
            assert strategy != "ddp"
            assert REFUSED[name] in found
            assert "fa.ddp()" in found
        else:
            assert same(found, expected)
            assert strategy != "fsdp" or name not in REFUSED


@pytest.mark.long
@pytest.mark.parametrize("name", ["halved", "given_itself"])
def test_a_captured_step_takes_given_parameters(pools, name):
    (expected,) = pools.run(1, trained, fa.local(), name)
    for found in pools.run(2, trained, fa.fsdp(), name, compiled):
        assert same(found, expected)


def compiled(step):
    return fa.compile(step, backend="eager")


def looked():
    train_step = program(strategy=fa.fsdp())
    state = train_step.init(seed=0)
    x, _ = batch_of(4)
    plain = train_step.look(state, lambda model: model(x), whole=True)

    def half(model):
        return functional_call(model, {n: 0.5 * p for n, p in model.named_parameters()}, (x,))

    def itself(model):
        return functional_call(model, dict(model.named_parameters()), (x,))

    assert torch.equal(train_step.look(state, itself, whole=True), plain)
    with pytest.raises(errors.CapabilityError, match="was replaced"):
        train_step.look(state, half, whole=True)
    assert torch.equal(train_step.look(state, lambda model: model(x), whole=True), plain)
    return True


def test_whole_parameters_of_a_look(pools):
    assert pools.run(2, looked) == [True] * 2


def remat(step):
    return fa.remat(step)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, fa.local()), (2, fa.ddp())], ids=["local", "ddp"])
def test_a_recomputed_block_with_given_parameters_raises(pools, ranks, strategy):
    for found in pools.run(ranks, trained, strategy, "halved", remat):
        assert "'weight' of a Block was replaced" in found
    for found in pools.run(ranks, trained, strategy, "given_itself", remat):
        assert not isinstance(found, str)


@pytest.mark.parametrize(
    "strategy", [fa.fsdp(), fa.fsdp(units="Linear"), fa.fsdp(reshard_after_forward=False)], ids=str
)
def test_recomputed_blocks_of_shards_are_taken(pools, strategy):
    (expected,) = pools.run(1, trained, fa.local(), "loss_fn")
    for found in pools.run(2, trained, strategy, "loss_fn", remat):
        assert same(found, expected)
