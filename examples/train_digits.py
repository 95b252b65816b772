"""A small CNN on scikit-learn's digits, evaluated exactly on data that no batch size divides.

python examples/train_digits.py
fnaccel launch -n 3 --strategy ddp examples/train_digits.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa


def data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16.0
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]  # 397 test rows: prime, so every rank count is uneven
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class CNN(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip


def loss_fn(model, batch):
    images, labels = batch
    return fa.Mean(F.cross_entropy(model(images), labels, reduction="sum"), weight=len(labels))


def metrics_fn(model, batch):
    images, labels = batch
    right = (model(images).argmax(dim=1) == labels).sum()
    return {"accuracy": fa.Mean(right, weight=len(labels)), "rows": fa.Sum(len(labels))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    train, test = data()
    with fa.start() as world:
        train_step = fa.train_step(loss_fn, model=fa.distribute(CNN), optimizer=fa.adamw(3e-3))
        state = train_step.init(seed=0)
        shards = fa.shard(DataLoader(train, batch_size=64, shuffle=True))
        for state, _ in fa.scan(train_step, state, shards, epochs=args.epochs, progress=True):
            pass
        scores = fa.evaluate(train_step, state, metrics_fn, fa.shard(DataLoader(test, batch_size=50)))
        world.print(f"accuracy {float(scores['accuracy']):.4f} on {int(scores['rows'])} held-out digits")


if __name__ == "__main__":
    main()
