"""What people who know JAX type first: its names, and its transformations around a train step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel import errors
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params

NAMES = {
    "fa.grad": (lambda: fa.grad, "fa.value_and_grad"),
    "fa.jit": (lambda: fa.jit, "fa.compile"),
    "fa.vmap": (lambda: fa.vmap, "torch.vmap of fa.pure"),
    "fa.tree_map": (lambda: fa.tree_map, "fa.tree.map"),
    "fa.optim.scale": (lambda: fa.optim.scale, r"fa.optim.chain\(..., lr=0.1\)"),
    "key.split": (lambda: fa.random.key(0).split(2), r"key.fold_in\(number\)"),
    "optimizer.init": (lambda: fa.adamw(0.1).init({}), "fa.train_step"),
    "another": (lambda: fa.adamw(0.1).nothing, "no attribute 'nothing'$"),
}


@pytest.mark.parametrize(("asked", "answer"), NAMES.values(), ids=NAMES)
def test_names_of_jax_and_optax_answer_with_ours(asked, answer):
    with pytest.raises(AttributeError, match=answer):
        asked()


@pytest.fixture(autouse=True)
def world():
    torch._dynamo.reset()
    with fa.start(device="cpu") as started:
        yield started


def called(train_step, state):
    return lambda x: train_step(state, (x, x.sum(1, keepdim=True)))[1]["loss"]


AROUND = {
    "grad": lambda train_step, state: torch.func.grad(called(train_step, state)),
    "vmap": lambda train_step, state: lambda x: torch.func.vmap(called(train_step, state))(x[None]),
    "grad of value_and_grad": lambda train_step, state: torch.func.grad(
        lambda x: fa.value_and_grad(train_step)(state, (x, x.sum(1, keepdim=True)))[0]["loss"]
    ),
    "init in a function": lambda train_step, state: torch.func.grad(
        lambda x: called(train_step, train_step.init(seed=0))(x)
    ),
    "compile": lambda train_step, state: torch.compile(called(train_step, state), backend="eager"),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_transformations_around_a_train_step_name_the_pure_update(around):
    train_step = program()
    state = train_step.init(seed=0)
    batch = batch_of(4)
    with pytest.raises(errors.CapabilityError, match=r"fa\.pure\(train_step\)"):
        around(train_step, state)(batch[0])
    assert train_step.live_state is state
    train_step(state, batch)


def test_a_full_graph_of_a_train_step_names_the_pure_update():
    train_step = program()
    whole = torch.compile(called(train_step, train_step.init(seed=0)), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"fa\.pure\(train_step\)"):
        whole(batch_of(4)[0])


def test_frozen_takes_a_function_of_name_and_parameter():
    trained = {}
    for frozen in (lambda name, parameter: parameter.ndim == 1, ("*.bias",)):
        train_step = program(frozen=frozen)
        state, _ = train_step(train_step.init(seed=0), batch_of(4))
        trained[callable(frozen)] = whole_params(state)
        assert set(fa.value_and_grad(train_step)(state, batch_of(4))[1]) == {
            n for n, _ in Net().named_parameters() if "weight" in n
        }
    assert all(map(torch.equal, trained[True].values(), trained[False].values()))
    assert "frozen" in str(program(frozen=lambda name, parameter: True).plan)


@pytest.mark.parametrize(
    ("frozen", "match"),
    [
        (lambda name, parameter: False, "matches no parameter"),
        (lambda name: True, "take two arguments"),
        (lambda name, parameter: "bias", "return True or False"),
    ],
)
def test_a_function_that_freezes_nothing_is_refused(frozen, match):
    with pytest.raises(errors.ArgumentError, match=match):
        program(frozen=frozen).init()


def given(model, batch):
    """The gradient of the summed square error, given by hand."""
    x, y = batch
    params = fa.params(model)
    grads = torch.func.grad(lambda values: (fa.call(model, values, x) - y).square().sum())(dict(params))
    return fa.Mean(fa.with_gradient((model(x) - y).square().sum(), params, grads), weight=len(y))


def second(model, batch):
    """A penalty on the gradient by the input, and so a second derivative."""
    x, y = batch
    slope = torch.func.grad(lambda x: (model(x) - y).square().sum())(x)
    return fa.Mean((model(x) - y).square().sum() + slope.square().sum(), weight=len(y))


def by_rows(loss, batch, clip):
    """One update of clipped rows, in a loop, in plain PyTorch."""
    torch.manual_seed(0)
    model = Net()
    params = dict(model.named_parameters())
    sums = {name: torch.zeros_like(value) for name, value in params.items()}
    for number in range(len(batch[0])):
        total = loss(model, tuple(part[number : number + 1] for part in batch)).total
        grads = torch.autograd.grad(total, list(params.values()))
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        for held, grad in zip(sums.values(), grads, strict=True):
            held += grad * (clip / norm).clamp(max=1.0)
    return {name: (value - 0.1 * sums[name] / len(batch[0])).detach() for name, value in params.items()}


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("loss", [loss_fn, given, second])
def test_rows_of_given_gradients_of_recomputed_blocks_and_of_second_derivatives(loss, remat):
    step = fa.per_example(loss, clip=0.5)
    train_step = program(fa.remat(step, "Block") if remat and loss is loss_fn else step)
    state, _ = train_step(train_step.init(seed=0), batch_of(6))
    for name, value in by_rows(loss, batch_of(6), 0.5).items():
        torch.testing.assert_close(whole_params(state)[name], value, rtol=1e-5, atol=1e-6)


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + x.sum().detach()
        return self.layer(x)


def backward_inside(model, batch):
    (model(batch[0]) - batch[1]).square().sum().backward()
    return loss_fn(model, batch)


@pytest.mark.parametrize(
    ("loss", "model", "match"),
    [(loss_fn, Counted, "buffer 'seen'"), (backward_inside, Net, r"torch\.func\.grad\(fn\)\(x\)")],
)
def test_what_a_row_can_not_do_is_named_and_the_state_stays_live(loss, model, match):
    train_step = program(fa.per_example(loss, clip=0.5), model=model)
    state = train_step.init(seed=0)
    with pytest.raises(errors.CapabilityError, match=match):
        train_step(state, batch_of(4))
    assert train_step.live_state is state
    assert not any(map(torch._C._functorch.is_functorch_wrapped_tensor, state.buffers.values()))
