"""Dropout by key against `F.dropout`, eager and compiled, and what `info` costs a step."""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F
from interleave import race
from torch import nn
from torch.utils.data import DataLoader

import fnaccel as fa


def plain(model, batch):
    return fa.Mean(model(batch).sum(), weight=len(batch))


def informed(model, batch, *, info):
    return fa.Mean(model(batch).sum() + 0 * info.step, weight=len(batch))


def main() -> None:
    """Print medians over blocks, in microseconds, and their ratios."""
    x, key = torch.randn(4, 64, 128), fa.random.key(3)
    rows = key.fold_in(torch.arange(4))
    by_torch = torch.compile(lambda x: F.dropout(x, 0.1), fullgraph=True)
    by_key = torch.compile(lambda x, key: fa.random.dropout(x, 0.1, key=key), fullgraph=True)
    calls = {
        "F.dropout": lambda: F.dropout(x, 0.1),
        "by key": lambda: fa.random.dropout(x, 0.1, key=key),
        "by key and row": lambda: fa.random.dropout(x, 0.1, key=rows),
        "F.dropout, compiled": lambda: by_torch(x),
        "by key and row, compiled": lambda: by_key(x, rows),
    }
    base = 0.0
    for name, samples in race(calls, blocks=15, calls=40).items():
        median = 1e6 * statistics.median(samples)
        base = base or median
        print(f"{name:<26}{median:8.1f} us{median / base:7.2f} x F.dropout")
    with fa.start(device="cpu"):
        (batch,) = fa.shard(DataLoader([torch.ones(8)] * 4, batch_size=4))
        steps = {}
        for loss_fn in (plain, informed):
            model = fa.distribute(lambda: nn.Linear(8, 1), "local")
            train_step = fa.train_step(loss_fn, model=model, optimizer=fa.sgd(0.0))
            states = [train_step.init()]

            def call(train_step=train_step, states=states):
                states[0], _ = train_step(states[0], batch)

            steps[loss_fn.__name__] = call
        for name, samples in race(steps, blocks=15, calls=40).items():
            print(f"a step, {name} loss{1e6 * statistics.median(samples):8.1f} us")


if __name__ == "__main__":
    main()
