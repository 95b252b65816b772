"""`info.gradients_at(params)`: a second gradient in one update, of the same rows and random numbers."""

from __future__ import annotations

import functools

import pytest
import torch

import fnaccel as fa
from fnaccel.errors import CapabilityError, TreeMismatchError
from fnaccel.world.world import current
from tests.engine.test_order_of_passes import Noisy
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params

RHO = 0.05


def sharpness_aware(grads, own, info):
    """SAM (arXiv:2010.01412) as a GRADS function: the gradient at the parameters a step up the slope."""
    norm = torch.stack([fa.tree.whole(g).square().sum() for g in grads.values()]).sum().sqrt()
    ascended = {name: info.params[name] + RHO * grad / norm for name, grad in grads.items()}
    return info.gradients_at(ascended), own


def by_hand(batches, lr):
    """The same in plain PyTorch, on all rows at once."""
    torch.manual_seed(0)
    model = Net()
    for x, y in batches:
        params = list(model.parameters())
        value = (model(x) - y).square().sum() / len(y)
        grads = torch.autograd.grad(value, params)
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        with torch.no_grad():
            before = [p.clone() for p in params]
            for p, g in zip(params, grads, strict=True):
                p += RHO * g / norm
        second = torch.autograd.grad((model(x) - y).square().sum() / len(y), params)
        with torch.no_grad():
            for p, old, g in zip(params, before, second, strict=True):
                p.copy_(old - lr * g)
    return {name: p.detach() for name, p in model.named_parameters()}


def sam_run(strategy, ranks, compiled):
    rank, size = current().rank, 8 // ranks
    sam = fa.Transform("sam", fa.Phase.GRADS, apply=sharpness_aware, needs="second gradient")
    step = sam(fa.accumulate(loss_fn, 2))
    step = fa.compile(step, scope="step") if compiled else step
    train_step = program(step, strategy=strategy, model=Net, optimizer=fa.sgd(0.1))
    state = train_step.init(seed=0)
    for call in range(3):
        rows = tuple(part[rank * size : (rank + 1) * size] for part in batch_of(8, call))
        state, metrics = train_step(state, rows)
    out = whole_params(state), float(metrics["loss"])
    train_step.close()
    return out


@pytest.mark.parametrize(
    ("strategy", "ranks", "compiled"),
    [
        ("local", 1, False),
        pytest.param("local", 1, True, marks=pytest.mark.long),
        ("ddp", 2, False),
        ("fsdp", 2, False),
        pytest.param("fsdp", 4, False, marks=pytest.mark.long),
        pytest.param("ddp", 2, True, marks=pytest.mark.long),
        pytest.param("fsdp", 2, True, marks=pytest.mark.long),
    ],
)
def test_sharpness_aware_minimisation_is_that_of_a_loop_by_hand(pools, strategy, ranks, compiled):
    expected = by_hand([batch_of(8, call) for call in range(3)], 0.1)
    for params, _ in pools.run(ranks, sam_run, strategy, ranks, compiled):
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-6)


def looked(strategy, asks):
    """Three updates of a model with dropout and batch norm, whose hook asks for gradients or does not."""
    found = []

    def ask(grads, own, info):
        if asks:
            at = info.gradients_at(info.params)
            found.append(all(torch.equal(fa.tree.whole(at[n]), fa.tree.whole(g)) for n, g in grads.items()))
        return grads, own

    step = fa.Transform("ask", fa.Phase.GRADS, apply=ask)(fa.accumulate(loss_fn, 2))
    train_step = program(step, strategy=strategy, model=Noisy)
    state = train_step.init(seed=0)
    losses = []
    for call in range(3):
        state, metrics = train_step(state, batch_of(8, call))
        losses.append((float(metrics["loss"]), float(torch.rand(()))))
    out = whole_params(state), {name: value.clone() for name, value in state.buffers.items()}, losses, found
    train_step.close()
    return out


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_second_gradient_at_the_same_parameters_is_the_first_and_leaves_no_trace(pools, strategy, ranks):
    usual = pools.run(ranks, functools.partial(seeded, looked), strategy, False)
    asked = pools.run(ranks, functools.partial(seeded, looked), strategy, True)
    for one, other in zip(usual, asked, strict=True):
        assert all(map(torch.equal, fa.tree.leaves(one[:2]), fa.tree.leaves(other[:2])))
        assert one[2] == other[2]
        assert other[3] == [True] * 3


def kept_run(strategy, needs):
    """One update by the second gradients, which the hook keeps in its state, clipped. Its first ones stay."""
    found = {}

    def keep(grads, own, info):
        first = {name: fa.tree.whole(grad).clone() for name, grad in grads.items()}
        second = info.gradients_at({name: 0.5 * info.params[name] for name in grads})
        found["first stays"] = all(torch.equal(fa.tree.whole(grads[name]), first[name]) for name in grads)
        found["norm"] = float(fa.tree.norm(second))
        found["second"] = second
        return second, second

    kept = fa.Transform("kept", fa.Phase.GRADS, apply=keep, init=lambda params: dict(params), needs=needs)
    step = fa.clip_norm(kept(fa.accumulate(loss_fn, 2)), 0.01)
    train_step = program(step, strategy=strategy, model=Noisy)
    state, _ = train_step(train_step.init(seed=0), batch_of(8))
    found["kept"] = float(fa.tree.norm(state.transforms["kept"]))
    found["after"] = float(fa.tree.norm(found.pop("second")))
    train_step.close()
    return found


@pytest.mark.parametrize("needs", ["second gradient", ()], ids=["declared", "undeclared"])
@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_gradients_of_both_passes_stay_as_they_were(pools, strategy, ranks, needs):
    for found in pools.run(ranks, kept_run, strategy, needs):
        assert found["first stays"]
        assert found["norm"] > 0.1
        assert found["kept"] == pytest.approx(found["norm"], rel=1e-6)
        assert found["after"] == pytest.approx(found["norm"], rel=1e-6)


def seeded(fn, *args):
    torch.manual_seed(5)
    return fn(*args)


def test_wrong_parameters_raise_by_name_and_the_state_stays_live():
    def wrong(grads, own, info):
        return info.gradients_at(
            {name: value for name, value in info.params.items() if "out" not in name}
        ), own

    with fa.start():
        step = fa.Transform("wrong", fa.Phase.GRADS, apply=wrong)(loss_fn)
        train_step = program(step, strategy="local", model=Noisy)
        state = train_step.init(seed=0)
        with pytest.raises(TreeMismatchError, match=r"out\.weight is missing"):
            train_step(state, batch_of(8))
        assert train_step.live_state is state
        train_step.close()


def test_the_plan_refuses_a_strategy_that_cannot():
    sam = fa.Transform("sam", fa.Phase.GRADS, apply=sharpness_aware, needs="second gradient")
    with fa.start(), pytest.raises(CapabilityError, match=r"sam needs .*second gradient"):
        fa.train_step(
            sam(loss_fn), model=fa.distribute(Noisy, fa.deepspeed(stage=1)), optimizer=fa.adamw(1e-3)
        )


class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(3, 6)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(6, 1) for _ in range(2))

    def forward(self, x, task):
        return self.heads[task](torch.tanh(self.body(x)))


def task_loss(task):
    def loss(model, batch):
        x, y = batch
        error = model(x, task) - (3 * y if task == 0 else 1 - 3 * y)
        return fa.Mean(error.square().sum(), weight=len(y))

    return loss


def projected(dot, norm, first, second):
    """PCGrad (arXiv:2001.06782) for two tasks: each gradient without its part against the other."""
    inner = dot(first, second).clamp(max=0)
    shares = inner / (norm(second) ** 2 + 1e-12), inner / (norm(first) ** 2 + 1e-12)
    return {name: (1 - shares[1]) * grad + (1 - shares[0]) * second[name] for name, grad in first.items()}


def pcgrad(grads, own, info):
    first, second = (info.gradients_at(info.params, loss=task_loss(task)) for task in range(2))
    return projected(fa.tree.dot, fa.tree.norm, first, second), own


def both_losses(model, batch):
    losses = [task_loss(task)(model, batch) for task in range(2)]
    return fa.Mean(sum(loss.total for loss in losses), weight=losses[0].weight)


def pcgrad_run(strategy, ranks):
    rank, size = current().rank, 8 // ranks
    surgery = fa.Transform("pcgrad", fa.Phase.GRADS, apply=pcgrad, needs="second gradient")
    train_step = program(surgery(fa.accumulate(both_losses, 2)), strategy=strategy, model=Heads)
    state = train_step.init(seed=0)
    for call in range(3):
        rows = tuple(part[rank * size : (rank + 1) * size] for part in batch_of(8, call))
        state, _ = train_step(state, rows)
    out = whole_params(state)
    train_step.close()
    return out


def pcgrad_by_hand():
    torch.manual_seed(0)
    model = Heads()
    params = dict(model.named_parameters())
    conflicts = []

    def flat(tree):
        return torch.cat([value.flatten() for value in tree.values()])

    for call in range(3):
        batch, both = batch_of(8, call), []
        for task in range(2):
            loss = task_loss(task)(model, batch)
            grads = torch.autograd.grad(
                loss.total / loss.weight, list(params.values()), materialize_grads=True
            )
            both.append(dict(zip(params, grads, strict=True)))
        conflicts.append(flat(both[0]) @ flat(both[1]) < 0)
        total = projected(lambda a, b: flat(a) @ flat(b), lambda a: flat(a).norm(), *both)
        with torch.no_grad():
            for name, param in params.items():
                param -= 0.1 * total[name]
    assert any(conflicts)
    return {name: param.detach() for name, param in params.items()}


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("local", 1), (fa.ddp(unused_parameters=True), 2), ("fsdp", 2)]
)
def test_gradients_of_two_losses_in_a_step_are_those_by_hand(pools, strategy, ranks):
    expected = pcgrad_by_hand()
    for params in pools.run(ranks, pcgrad_run, strategy, ranks):
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scope", ["loss", "step"])
def test_another_loss_of_a_compiled_step_is_refused_by_name(scope):
    surgery = fa.Transform("pcgrad", fa.Phase.GRADS, apply=pcgrad, needs="second gradient")
    with fa.start():
        step = fa.compile(surgery(both_losses), scope, backend="aot_eager")
        train_step = program(step, model=Heads)
        state = train_step.init(seed=0)
        with pytest.raises(CapabilityError, match="compiles the step's loss"):
            train_step(state, batch_of(8))
        assert train_step.live_state is state
