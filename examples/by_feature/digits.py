"""The task of these examples: scikit-learn's digits, a small CNN, its loss and its accuracy."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 images of 8 x 8 pixels, and their labels, in a random order that is always the same."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16.0
    return images[order], torch.tensor(digits.target)[order]


def loaders(batch: int = 64) -> tuple[DataLoader, DataLoader]:
    """1,400 images to train on, 397 to evaluate on. `batch` is the number of rows on all ranks together."""
    images, labels = tensors()
    train, test = TensorDataset(images[:1400], labels[:1400]), TensorDataset(images[1400:], labels[1400:])
    return DataLoader(train, batch_size=batch, shuffle=True), DataLoader(test, batch_size=batch)


def build_model() -> nn.Module:
    return nn.Sequential(
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
    return {"accuracy": fa.Mean(right, weight=len(labels)), "loss": loss_fn(model, batch)}


def parser(description: str, *, epochs: int = 5) -> argparse.ArgumentParser:
    """The flags that all of these examples have."""
    arguments = argparse.ArgumentParser(description=description.splitlines()[0])
    arguments.add_argument("--epochs", type=int, default=epochs)
    return arguments
