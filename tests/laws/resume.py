"""A run that is cut anywhere and goes on in new objects, over every kind of loader."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.data as torch_data
from torch import nn

import fnaccel as fa
from fnaccel.world.world import current
from tests.tiny_models import whole

ITEMS, BATCH = 22, 5  # five batches an epoch, the last of two rows


class Rows(torch_data.Dataset):
    """Rows with noise that each reading draws from all the global streams."""

    def __init__(self, noise: bool = True) -> None:
        self.noise = noise

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        x = torch.linspace(0, 1, 4) * (index + 1) / ITEMS
        if self.noise:
            x = x + 0.1 * (random.random() + float(np.random.rand()) + torch.rand(()))
        return {"id": torch.tensor(index), "x": x}


class Flow(torch_data.IterableDataset):
    """The same rows in order, by number; can skip where `able`."""

    def __init__(self, first: int = 0, *, able: bool, rows: Rows | None = None) -> None:
        self.first, self.rows = first, rows or Rows()
        if able:
            self.skip = lambda samples: Flow(samples, able=True, rows=self.rows)

    def __iter__(self):
        info = torch_data.get_worker_info()
        each, mine = (1, 0) if info is None else (info.num_workers, info.id)
        return (self.rows[i] for i in range(self.first, ITEMS) if i % each == mine)


class Packed(list):
    """Batches made beforehand, as any iterable."""


def stateful(dataset, **options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, **options)


def packed():
    plain = torch_data.DataLoader(Rows(noise=False), batch_size=BATCH)
    return Packed(plain)


LOADERS = {
    "in order": lambda: torch_data.DataLoader(Rows(), batch_size=BATCH),
    "shuffled": lambda: torch_data.DataLoader(Rows(), batch_size=BATCH, shuffle=True),
    "workers": lambda: torch_data.DataLoader(Rows(), batch_size=BATCH, shuffle=True, num_workers=2),
    "batch sampler": lambda: torch_data.DataLoader(
        Rows(), batch_sampler=[[0, 5, 9], [1], [2, 3, 4, 6, 7], [8, *range(10, ITEMS)]]
    ),
    "iterable": lambda: torch_data.DataLoader(Flow(able=False), batch_size=BATCH),
    "iterable that skips": lambda: torch_data.DataLoader(Flow(able=True), batch_size=BATCH),
    "iterable through workers": lambda: torch_data.DataLoader(
        Flow(able=False), batch_size=BATCH, num_workers=2
    ),
    "stateful": lambda: stateful(Rows(), batch_size=BATCH, shuffle=True),
    "stateful iterable": lambda: stateful(Flow(able=False), batch_size=BATCH),
    "any iterable": packed,
}
SHARDS = {
    "plain": {},
    "window": {"window": 3},
    "pairs": {"window": 2},
    "dispatch": {"dispatch": True},
    "wrap": {"remainder": "wrap"},
    "drop": {"remainder": "drop"},
}
# where in-process noise depends on which rank reads a row, rank counts are compared without it
SAME_ON_ANY_RANKS = (
    "workers",
    "iterable",
    "iterable that skips",
    "iterable through workers",
    "stateful iterable",
    "any iterable",
)


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 6), nn.Dropout(dropout), nn.Linear(6, 1)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.first(x))))


def loss_fn(model, batch):
    out = model(batch["x"])
    target = batch["x"].sum(1, keepdim=True) + 0.01 * random.random() * model.training * JITTER
    nll = F.mse_loss(out, target, reduction="sum")
    return fa.Mean(nll, weight=len(out), aux={"ids": fa.Concat(batch["id"]), "rows": fa.Sum(float(len(out)))})


JITTER = 1.0


def make(strategy, precision, dropout, rng):
    step = fa.with_ema(fa.clip_norm(loss_fn, 1.0), 0.9)
    if precision != "fp32":
        step = fa.with_precision(step, precision)
    return fa.train_step(
        step,
        model=fa.distribute(lambda: Net(dropout), strategy),
        optimizer=fa.adamw(fa.warmup_cosine(1e-2, warmup=2, total=30)),
        rng=rng,
    )


def run(case, directory, cuts, total):
    """Train to `total` steps, beginning anew from disk at each of `cuts`; ids and losses of each step, the end.

    The parameters are of this rank alone; nothing of one part of the run reaches the next but the disk.
    """
    global JITTER
    JITTER = 1.0
    seen = []
    for stop in [*cuts, total]:
        disturb()
        if stop == cuts[0] if cuts else stop == total:
            random.seed(current().rank), np.random.seed(1), torch.manual_seed(2)
        train_step = make(case["strategy"], case["precision"], case["dropout"], case["rng"])
        loader = LOADERS[case["loader"]]()  # before the streams are put back: a StatefulDataLoader draws
        state = fa.resume_or_init(directory, train_step, seed=3, extras={"losses": []})
        shards = fa.shard(loader, seed=4, **SHARDS[case["shards"]])
        for state, metrics in fa.scan(train_step, state, shards, steps=stop):
            state.extras["losses"].append(float(metrics["loss"]))
            seen.append((metrics["ids"].tolist(), float(metrics["loss"])))
        if stop != total:
            fa.save(directory, state)
        trees = (("params", state.params), ("ema", state.ema))
        end = {f"{name}/{key}": whole(value) for name, tree in trees for key, value in tree.items()}
        found = seen, end, state.extras["losses"], (state.step, int(state.updates), state.data)
        train_step.close()
    return found


def quiet(loader):
    """Without noise: what is drawn in the training process depends on which rank reads a row."""
    dataset = getattr(loader, "dataset", None)
    for rows in (dataset, getattr(dataset, "rows", None)):
        if isinstance(rows, Rows):
            rows.noise = False


def disturb():
    """A new process has streams of its own."""
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
