"""Ranks that make different calls: rank 1 saves where rank 0 trains. All of them end and name both calls.

fnaccel launch -n 2 --cpu examples/by_feature/hang.py
"""

from __future__ import annotations

import torch
from torch import nn

import fnaccel as fa


def loss_fn(model: nn.Module, batch: torch.Tensor) -> fa.Mean:
    return fa.Mean(model(batch).square().sum(), weight=len(batch))


def main() -> None:
    with fa.start() as world:
        model = fa.distribute(lambda: nn.Linear(4, 1), "ddp")
        train_step = fa.train_step(loss_fn, model=model, optimizer=fa.sgd(0.1))
        state = train_step.init(seed=0)
        for step in range(10):
            if step == 3 and world.rank == 1:
                fa.save("runs/hang", state)  # the mistake: every rank must call it
            state, _ = train_step(state, torch.ones(8, 4))


if __name__ == "__main__":
    main()
