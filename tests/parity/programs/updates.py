"""Programs on an update as a function: many runs at once, gradients through training, several updates in one graph."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call

import fnaccel as fa
from tests.parity.programs.derivatives import train
from tests.parity.programs.raw_loop import ROWS, by_hand, by_optimizer, net, rows_of, squares
from tests.tiny_models import Net, batch_of, loss_fn, program

RATES = (0.003, 0.01, 0.03)
UPDATES = 3

# -- 2: many seeds and rates -------------------------------------------------------------------------------


def rates(strategy, transform, folder):
    train_step = program(transform(loss_fn), strategy=strategy, optimizer=fa.adamw(0.01))
    update = fa.pure(train_step)

    batches = [rows_of(train_step, number) for number in range(UPDATES)]

    def run(values, lr):
        losses = []
        for batch in batches:
            values, metrics = update(values, batch, lr=lr)
            losses.append(metrics["loss"])
        return values, torch.stack(losses)

    starts = [update.init(seed=seed) for seed in range(len(RATES))]
    stacked = fa.tree.map(lambda *leaves: torch.stack(leaves), *starts)
    values, losses = torch.func.vmap(run)(stacked, torch.tensor(RATES))
    return losses.flatten().tolist(), dict(values["params"])


def rates_by_hand():
    runs = [by_optimizer(torch.optim.AdamW, UPDATES, seed, lr=lr) for seed, lr in enumerate(RATES)]
    losses = [loss for losses, _ in runs for loss in losses]
    return losses, {name: torch.stack([params[name] for _, params in runs]) for name in runs[0][1]}


# -- 4: hypergradients -------------------------------------------------------------------------------------


def hypergradients(strategy, transform, folder):
    """Derivatives of the loss after training: by the rate, the weight decay, and the first parameters."""
    train_step = program(transform(loss_fn), strategy=strategy, optimizer=fa.adamw(0.01))
    update = fa.pure(train_step)
    first = update.init(seed=0)

    def after_training(lr, weight_decay, params):
        values = first | {"params": params}
        for number in range(UPDATES):
            values, _ = update(values, rows_of(train_step, number), lr=lr, weight_decay=weight_decay)
        return update.loss(values, rows_of(train_step, 9))

    arguments = torch.tensor(0.02), torch.tensor(0.01), first["params"]
    (by_rate, by_decay, by_params), loss = torch.func.grad_and_value(after_training, argnums=(0, 1, 2))(
        *arguments
    )
    return [float(loss)], by_params | {"lr": by_rate, "weight_decay": by_decay}


def hypergradients_by_hand():
    """AdamW written with a graph, in double precision."""
    model = net().double()
    first = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    lr, decay = (torch.tensor(number, dtype=torch.float64, requires_grad=True) for number in (0.02, 0.01))

    def loss_of(params, number):
        x, y = (value.double() for value in batch_of(ROWS, seed=number))
        return squares(functional_call(model, params, (x,)), y) / ROWS

    params = dict(first)
    means, sizes = ({name: torch.zeros_like(p) for name, p in first.items()} for _ in range(2))
    for number in range(UPDATES):
        grads = torch.autograd.grad(loss_of(params, number), list(params.values()), create_graph=True)
        for (name, p), g in zip(list(params.items()), grads, strict=True):
            means[name] = 0.9 * means[name] + 0.1 * g
            sizes[name] = 0.999 * sizes[name] + 0.001 * g * g
            mean, size = means[name] / (1 - 0.9 ** (number + 1)), sizes[name] / (1 - 0.999 ** (number + 1))
            params[name] = p - lr * decay * p - lr * mean / (size.sqrt() + 1e-8)
    loss = loss_of(params, 9)
    by_rate, by_decay, *by_params = torch.autograd.grad(loss, [lr, decay, *first.values()])
    grads = dict(zip(first, by_params, strict=True)) | {"lr": by_rate, "weight_decay": by_decay}
    return [float(loss.detach())], {name: value.float() for name, value in grads.items()}


# -- 12: several updates in one program --------------------------------------------------------------------


def one_graph(strategy, transform, folder):
    train_step = program(transform(loss_fn), strategy=strategy, optimizer=fa.adamw(0.01))
    update = fa.pure(train_step)

    def run(values, batches, lr):
        losses = []
        for batch in batches:
            values, metrics = update(values, batch, lr=lr)
            losses.append(metrics["loss"])
        return values, torch.stack(losses)

    graph = torch.compile(run, fullgraph=True, backend="aot_eager")
    batches = [rows_of(train_step, number) for number in range(2)]
    values, losses = graph(update.init(seed=0), batches, torch.tensor(0.02))
    return losses.tolist(), dict(values["params"])


def one_graph_by_hand():
    return by_optimizer(torch.optim.AdamW, steps=2, lr=0.02)


# -- 20: inner updates in the loss of a train step ---------------------------------------------------------


class NetAndRate(Net):
    """A model and the rate at which it adapts, which is learned."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.05))


def learned_rate(strategy, transform, folder):
    """Meta-SGD by pure updates with momentum. One row is one task."""
    update = fa.pure(program(loss_fn, strategy=strategy, optimizer=fa.sgd(0.1, momentum=0.9)))
    first = update.init()

    def meta(model, batch):
        params = fa.params(model)
        own = {name: value for name, value in params.items() if name != "rate"}
        total = 0.0
        for x, y in zip(*batch, strict=True):
            values = first | {"params": own}
            for _ in range(2):
                values, _ = update(values, (x[None], y[None]), lr=params["rate"])
            total = total + update.loss(values, (-x[None], -y[None]))
        return fa.Mean(total, weight=len(batch[0]))

    return train(transform(meta), strategy, model=NetAndRate, optimizer=fa.sgd(0.005))


def learned_rate_by_hand():
    def total(model, x, y, number):
        result = 0.0
        for row, target in zip(x, y, strict=True):
            params = {name: p for name, p in model.named_parameters() if name != "rate"}
            moments = dict.fromkeys(params, 0.0)
            for _ in range(2):
                out = functional_call(model, params, (row[None],))
                grads = torch.autograd.grad(
                    squares(out, target[None]), list(params.values()), create_graph=True
                )
                for (name, p), g in zip(list(params.items()), grads, strict=True):
                    moments[name] = 0.9 * moments[name] + g
                    params[name] = p - model.rate * moments[name]
            result = result + squares(functional_call(model, params, (-row[None],)), -target[None])
        return result

    return by_hand(total, lr=0.005, kind=NetAndRate)
