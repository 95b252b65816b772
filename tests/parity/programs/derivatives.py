"""Programs that take derivatives inside of a step, or read the gradient of a step."""

from __future__ import annotations

import attrs
import torch
from torch.func import functional_call, grad, jvp, vmap

import fnaccel as fa
from tests.parity.programs.raw_loop import ROWS, by_hand, net, params_of, rows_of, sgd_, squares
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params

# -- 3: MAML -----------------------------------------------------------------------------------------------


def maml_loss(model, batch):
    """One row is one task: adapt to it by one step, and judge by its mirror image."""
    x, y = batch
    params = fa.params(model)

    def task(x, y):
        inner = grad(lambda p: squares(fa.call(model, p, x[None]), y[None]))(params)
        fast = {name: value - 0.1 * inner[name] for name, value in params.items()}
        return squares(fa.call(model, fast, -x[None]), -y[None])

    return fa.Mean(vmap(task)(x, y).sum(), weight=len(y))


def maml(strategy, transform, folder):
    return train(transform(maml_loss), strategy)


def train(step, strategy, **options):
    train_step = program(step, strategy=strategy, **options)
    state = train_step.init(seed=0)
    losses = []
    for number in range(3):
        state, metrics = train_step(state, rows_of(train_step, number))
        losses.append(float(metrics["loss"]))
    return losses, whole_params(state)


def maml_by_hand():
    def total(model, x, y, number):
        result = 0.0
        for row, target in zip(x, y, strict=True):
            params = dict(model.named_parameters())
            inner = torch.autograd.grad(
                squares(model(row[None]), target[None]), list(params.values()), create_graph=True
            )
            fast = {name: p - 0.1 * g for (name, p), g in zip(params.items(), inner, strict=True)}
            result = result + squares(functional_call(model, fast, (-row[None],)), -target[None])
        return result

    return by_hand(total)


# -- 5: gradients of rows ----------------------------------------------------------------------------------


def private(strategy, transform, folder):
    """DP-SGD. Without noise, which is a secret, and has tests of its own."""
    return train(transform(fa.per_example(loss_fn, clip=0.5)), strategy)


def row_grads(model, x, y):
    params = list(model.parameters())
    return [torch.autograd.grad(squares(model(x[i : i + 1]), y[i : i + 1]), params) for i in range(len(x))]


def norm_of(grads):
    return torch.cat([g.flatten() for g in grads]).norm()


def private_by_hand():
    model = net()
    losses = []
    for number in range(3):
        x, y = batch_of(ROWS, seed=number)
        losses.append(float(squares(model(x), y).detach()) / ROWS)
        rows = row_grads(model, x, y)
        shares = [min(1.0, 0.5 / float(norm_of(grads))) for grads in rows]
        clipped = [
            sum(share * g for share, g in zip(shares, each, strict=True)) / ROWS
            for each in zip(*rows, strict=True)
        ]
        sgd_(model.parameters(), clipped)
    return losses, params_of(model)


def variance(strategy, transform, folder):
    """The variance of the gradient over rows, read between updates."""
    train_step = program(transform(loss_fn), strategy=strategy)
    state = train_step.init(seed=0)
    read = []
    for number in range(2):
        batch = rows_of(train_step, number)
        _, mean = fa.value_and_grad(train_step)(state, batch)
        norms = train_step.look(state, fa.row_norms(loss_fn), batch)["norm"].value
        norms = fa.gather(norms, valid=len(norms))  # of the rows of all ranks
        read.append(float(norms.square().mean() - fa.tree.norm(mean) ** 2))
        state, _ = train_step(state, batch)
    return read, whole_params(state)


def variance_by_hand():
    model = net()
    read = []
    for number in range(2):
        rows = row_grads(model, *batch_of(ROWS, seed=number))
        mean = [sum(each) / ROWS for each in zip(*rows, strict=True)]
        apart = [[g - m for g, m in zip(grads, mean, strict=True)] for grads in rows]
        read.append(sum(float(norm_of(grads)) ** 2 for grads in apart) / ROWS)
        sgd_(model.parameters(), mean)
    return read, params_of(model)


# -- 9: the gradient of a step, with aux -------------------------------------------------------------------


def loss_with_aux(model, batch):
    x, y = batch
    error = model(x) - y
    aux = {
        "mae": fa.Mean(error.abs().sum(), weight=len(y)),
        "above": fa.Sum((error > 0).sum()),
        "each": fa.Concat(error[:, 0]),
    }
    return fa.Mean(error.square().sum(), weight=len(y), aux=aux)


def with_aux(strategy, transform, folder):
    train_step = program(transform(loss_with_aux), strategy=strategy)
    state = train_step.init(seed=0)
    read = []
    for number in range(2):
        metrics, grads = fa.value_and_grad(train_step)(state, rows_of(train_step, number))
        read += [float(metrics[name]) for name in ("loss", "mae", "above")] + metrics["each"].tolist()
        moved = fa.tree.axpy(-0.1, grads, dict(state.params))
        state = train_step.adopt(attrs.evolve(state, params=moved))
    return read, whole_params(state)


def with_aux_by_hand():
    model = net()
    read = []
    for number in range(2):
        x, y = batch_of(ROWS, seed=number)
        error = model(x) - y
        loss = error.square().mean()
        read += [float(loss.detach()), float(error.detach().abs().mean()), float((error > 0).sum())]
        read += error[:, 0].tolist()
        sgd_(model.parameters(), torch.autograd.grad(loss, list(model.parameters())))
    return read, params_of(model)


# -- 11: products with the Hessian, Gauss-Newton products, sharpness ------------------------------------------


VECTOR = {name: torch.full(p.shape, 3.0).add(len(name)).sin() for name, p in Net().named_parameters()}


def hessian_loss(model, batch):
    """Its gradient is the product of the Hessian with a vector."""
    x, y = batch
    params = fa.params(model)
    grads = torch.autograd.grad(squares(fa.call(model, params, x), y), [*params.values()], create_graph=True)
    products = [(g * VECTOR[name]).sum() for name, g in zip(params, grads, strict=True)]
    return fa.Mean(sum(products), weight=len(y))


def gauss_newton_loss(model, batch):
    """J v of the outputs, weighted by the second derivative of the squares."""
    x, y = batch
    params = fa.params(model)
    held = {name: value.detach() for name, value in params.items()}
    _, pushed = jvp(lambda p: fa.call(model, p, x), (held,), (VECTOR,))
    return fa.Mean((2 * pushed * fa.call(model, params, x)).sum(), weight=len(y))


def product(loss, strategy, transform):
    """The product at the first parameters, and its curvature along the vector."""
    train_step = program(transform(loss), strategy=strategy)
    state = train_step.init(seed=0)
    _, found = fa.value_and_grad(train_step)(state, rows_of(train_step, 0))
    step = fa.tree.axpy(-0.1, found, dict(state.params))
    state = train_step.adopt(attrs.evolve(state, params=step))
    return [float(fa.tree.norm(found))], whole_params(state)


def hessian(strategy, transform, folder):
    return product(hessian_loss, strategy, transform)


def gauss_newton(strategy, transform, folder):
    return product(gauss_newton_loss, strategy, transform)


def matrix_by_hand(matrix_of):
    """The same by a whole matrix, in double precision."""
    model = net().double()
    names, shapes = zip(*((n, p.shape) for n, p in model.named_parameters()), strict=True)
    x, y = (value.double() for value in batch_of(ROWS))
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])

    def out(flat):
        parts = flat.split([shape.numel() for shape in shapes])
        params = {n: part.view(shape) for n, part, shape in zip(names, parts, shapes, strict=True)}
        return functional_call(model, params, (x,))

    vector = torch.cat([VECTOR[name].double().flatten() for name in names])
    found = matrix_of(out, y, flat) @ vector / ROWS
    moved = (flat - 0.1 * found).float().split([shape.numel() for shape in shapes])
    params = {n: part.view(shape) for n, part, shape in zip(names, moved, shapes, strict=True)}
    return [float(found.norm())], params


def hessian_by_hand():
    return matrix_by_hand(
        lambda out, y, at: torch.autograd.functional.hessian(lambda flat: squares(out(flat), y), at)
    )


def gauss_newton_by_hand():
    def matrix(out, y, at):
        jacobian = torch.autograd.functional.jacobian(lambda flat: out(flat)[:, 0], at)
        return 2 * jacobian.T @ jacobian

    return matrix_by_hand(matrix)


def ascend(grads, info):
    return fa.tree.scale(grads, 0.05 / (fa.tree.norm(grads) + 1e-12))


def sharpness(strategy, transform, folder):
    return train(transform(fa.perturb(loss_fn, ascend)), strategy)


def sharpness_by_hand():
    model = net()
    params = list(model.parameters())
    losses = []
    for number in range(3):
        x, y = batch_of(ROWS, seed=number)
        loss = squares(model(x), y) / ROWS
        grads = torch.autograd.grad(loss, params)
        before = [p.detach().clone() for p in params]
        sgd_(params, grads, lr=-0.05 / norm_of(grads))
        grads = torch.autograd.grad(squares(model(x), y) / ROWS, params)
        with torch.no_grad():
            for param, kept in zip(params, before, strict=True):
                param.copy_(kept)
        sgd_(params, grads)
        losses.append(float(loss.detach()))
    return losses, params_of(model)
