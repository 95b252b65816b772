"""A pure update of parameters in a graph of autograd: the gradients that torch.func computes."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from tests.program.test_pure import BATCHES, OPTIMIZERS, STEPS, Normed, Wide, program, through
from tests.program.test_pure import world as world


def both(update, steps=3, batches=BATCHES):
    """Gradients of the loss after some updates, by the initial parameters: by autograd, and by torch.func."""
    first = update.init(seed=0)

    def final(params):
        return through(update, 0.05, steps, first | {"params": params})

    leaves = {name: value.clone().requires_grad_() for name, value in first["params"].items()}
    grads = torch.autograd.grad(final(leaves), [*leaves.values()], materialize_grads=True)
    return dict(zip(leaves, grads, strict=True)), torch.func.grad(final)(first["params"])


def equal(found, expected):
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("name", [name for name in STEPS if name != "keyed"])
def test_each_step(name):
    equal(*both(fa.pure(program(STEPS[name]))))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer(name):
    equal(*both(fa.pure(program(optimizer=OPTIMIZERS[name]))))


@pytest.mark.parametrize("step", ["plain", "accumulated", "everything"])
def test_a_batch_norm_and_a_skip(step):
    equal(
        *both(
            fa.pure(program(fa.skip_nonfinite(STEPS[step]) if step == "plain" else STEPS[step], model=Normed))
        )
    )


class Spare(Wide):
    """Has a parameter that the loss does not use."""

    def __init__(self):
        super().__init__()
        self.spare = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))


def test_a_parameter_without_a_gradient_and_a_loss_without_parameters():
    equal(*both(fa.pure(program(optimizer=OPTIMIZERS["sgd"], model=Spare))))
    constant = fa.pure(
        program(lambda model, batch: fa.Mean(batch[1].sum(), weight=12), optimizer=OPTIMIZERS["sgd"])
    )
    first = constant.init(seed=0)
    leaves = {name: value.clone().requires_grad_() for name, value in first["params"].items()}
    values, _ = constant({**first, "params": leaves}, BATCHES[0])
    assert all(torch.equal(values["params"][name], leaf) for name, leaf in leaves.items())


def test_a_second_derivative_through_an_update():
    update = fa.pure(program(optimizer=OPTIMIZERS["momentum"]))
    first = update.init(seed=0)

    def final(rate):
        return through(update, rate, 2, first)

    rate = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(final(rate), rate, create_graph=True)
    (bend,) = torch.autograd.grad(slope, rate)
    assert bend.item() == pytest.approx(
        torch.func.grad(torch.func.grad(final))(rate.detach()).item(), rel=1e-9
    )
