"""What all programs share: the rows of a rank, and the loop in plain PyTorch on the rows of all ranks."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.parameter_losses import part_of
from tests.tiny_models import Net, batch_of

ROWS = 12


def rows_of(train_step, number, factor=1.0):
    """This rank's rows of a batch: 7 and 5 of 12 on two ranks. `factor` spoils the targets."""
    mesh = train_step.mesh["loss"]
    x, y = batch_of(ROWS, seed=number)
    return part_of((x, factor * y), mesh.rank, mesh.size)


def loader_of(rows, batch_size=8):
    return DataLoader(TensorDataset(*batch_of(rows)), batch_size=batch_size)


def squares(out, y):
    return (out - y).square().sum()


def net(seed=0, kind=Net):
    """The parameters of `train_step.init(seed)`."""
    torch.manual_seed(seed)
    return kind()


def sgd_(params, grads, lr=0.1):
    with torch.no_grad():
        for param, grad in zip(params, grads, strict=True):
            param -= lr * grad


def by_hand(total, steps=3, lr=0.1, kind=Net):
    """Losses and parameters after plain SGD. `total(model, x, y, number)` is the sum over rows."""
    model = net(kind=kind)
    losses = []
    for number in range(steps):
        x, y = batch_of(ROWS, seed=number)
        loss = total(model, x, y, number) / ROWS
        sgd_(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), lr)
        losses.append(float(loss.detach()))
    return losses, params_of(model)


def by_optimizer(kind, steps=3, seed=0, **options):
    """Losses and parameters after updates by an optimizer of torch."""
    model = net(seed)
    optimizer = kind(model.parameters(), **options)
    losses = []
    for number in range(steps):
        x, y = batch_of(ROWS, seed=number)
        optimizer.zero_grad()
        loss = squares(model(x), y) / ROWS
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, params_of(model)


def params_of(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}
