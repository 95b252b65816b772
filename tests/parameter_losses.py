"""Losses that compute with parameters as values, and the raw loops that they must equal. One row is one task."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.func import functional_call, grad, jvp, vmap

import fnaccel as fa
from tests.tiny_models import Net, batch_of, program, whole_params


def errors(out, y):
    return (out - y).square().sum()


def halved(call, params, model, x, y):
    """Other parameters than the model's own."""
    return errors(call({name: 0.5 * value for name, value in params.items()}, x), y)


def adapted(call, params, model, x, y):
    """MAML: each row is a task, adapted to with one step."""

    def task(params, x, y):
        inner = grad(lambda p: errors(call(p, x[None]), y[None]))(params)
        fast = {name: value - 0.1 * inner[name] for name, value in params.items()}
        return errors(call(fast, -x[None]), y[None])

    return vmap(task, (None, 0, 0))(params, x, y).sum()


def curved(call, params, model, x, y):
    """A product of the Hessian: linear in the loss, so micro-batches and ranks add."""
    grads = torch.autograd.grad(errors(call(params, x), y), list(params.values()), create_graph=True)
    return sum((g * p.detach()).sum() for g, p in zip(grads, params.values(), strict=True))


def pushed(call, params, model, x, y):
    """A Gauss-Newton product: a forward derivative inside of the loss."""
    held = {name: value.detach() for name, value in params.items()}
    _, moved = jvp(lambda p: call(p, x), (held,), ({name: value.cos() for name, value in held.items()},))
    return (2 * moved * call(params, x)).sum()


def both(call, params, model, x, y):
    """The model through its own forward, and as a function."""
    return errors(model(x), y) + halved(call, params, model, x, y)


def some(call, params, model, x, y):
    """Parameters of which only some are given, and used."""
    return errors(call({"out.weight": 0.5 * params["out.weight"]}, x), y)


LOSSES: dict[str, Any] = {fn.__name__: fn for fn in (halved, adapted, curved, pushed, both, some)}


def loss_of(name):
    def loss_fn(model, batch):
        x, y = batch

        def call(params, x):
            return fa.call(model, params, x)

        return fa.Mean(LOSSES[name](call, fa.params(model), model, x, y), weight=len(y))

    return loss_fn


def raw(name, rows=12, steps=2, make=Net, lr=0.05):
    """Losses and parameters of a loop in plain torch."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        x, y = batch_of(rows, seed=step)
        params = dict(model.named_parameters())
        total = LOSSES[name](lambda p, x: functional_call(model, p, (x,)), params, model, x, y) / rows
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


def part_of(batch, rank, ranks, ragged=True):
    """A rank's rows: 7 and 5 of 12 on two ranks."""
    rows = len(batch[0])
    edges = [rows * r // ranks + (1 if ragged and 0 < r < ranks else 0) for r in range(ranks + 1)]
    return tuple(value[edges[rank] : edges[rank + 1]] for value in batch)


def trained(name, strategy, change=None, steps=2, make=Net, ragged=True, optimizer=None):
    """Losses and whole parameters of fnaccel's loop."""
    step = loss_of(name)
    train_step = program(
        step if change is None else change(step),
        strategy=strategy,
        optimizer=optimizer or fa.sgd(0.05),
        model=make,
    )
    state = train_step.init(seed=0)
    losses = []
    for number in range(steps):
        mesh = train_step.mesh["loss"]
        batch = part_of(batch_of(12, seed=number), mesh.rank, mesh.size, ragged)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Grad strides")  # of DDP, for a second derivative
            state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, whole_params(state), str(train_step.plan)


def accumulated(step):
    return fa.accumulate(step, 4)


def recomputed(step):
    return fa.remat(step)


def captured(step):
    return fa.compile(step, backend="aot_eager")


def equals(found, expected, rtol=1e-5):
    return all(
        abs(a - b) < 1e-6 * max(1, abs(b)) for a, b in zip(found[0], expected[0], strict=True)
    ) and fa.tree.allclose(found[1], expected[1], rtol=rtol, atol=1e-6)
