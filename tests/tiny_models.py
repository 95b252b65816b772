"""Tiny models and losses that many tests share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.mix(x))

    def encode(self, x):
        return self.mix(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)

    def scored(self, x):
        """A method that is not `forward`."""
        return self(x) * 2.0


def loss_fn(model, batch):
    x, y = batch
    return fa.Mean(F.mse_loss(model(x), y, reduction="sum"), weight=len(y))


def batch_of(rows: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator)
    return x, x.sum(dim=1, keepdim=True).sin()


def whole(value):
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().clone()


def whole_params(state):
    return {name: whole(value) for name, value in state.params.items()}


def program(step=loss_fn, *, strategy="local", optimizer=None, model=Net, **options):
    return fa.train_step(
        step, model=fa.distribute(model, strategy), optimizer=optimizer or fa.sgd(0.1), **options
    )
