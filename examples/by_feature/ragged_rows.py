"""Rows of different lengths, read by rank 0 for all.

It takes the place of Accelerate's slice_fn_for_dispatch.

    python examples/by_feature/ragged_rows.py
    fnaccel launch -n 2 --strategy ddp examples/by_feature/ragged_rows.py

Each row is the set of inked pixels of a digit, and digits have different numbers of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from digits import parser, tensors
from torch import nn
from torch.utils.data import DataLoader

import fnaccel as fa


class PixelSet(nn.Module):
    """The average of the vectors of all inked pixels, and a classifier."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.pixels = nn.EmbeddingBag(64, width, mode="mean")
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, rows: list[torch.Tensor]) -> torch.Tensor:
        starts = torch.tensor([0, *(len(row) for row in rows[:-1])]).cumsum(0)
        device = self.pixels.weight.device
        return self.head(self.pixels(torch.cat(list(rows)).to(device), starts.to(device)))


def collate(samples):
    rows, labels = zip(*samples, strict=True)
    return {"rows": fa.data.Rows(rows), "labels": torch.stack(labels)}


def loss_fn(model, batch):
    labels = batch["labels"].to(next(model.parameters()).device)
    return fa.Mean(F.cross_entropy(model(batch["rows"]), labels, reduction="sum"), weight=len(labels))


def main() -> None:
    args = parser(__doc__, epochs=8).parse_args()
    images, labels = tensors()
    samples = [(image.flatten().nonzero()[:, 0], label) for image, label in zip(images, labels, strict=True)]
    loader = DataLoader(samples[:1400], batch_size=64, shuffle=True, collate_fn=collate)
    with fa.start() as world:
        step = fa.accumulate(loss_fn, 2)
        train_step = fa.train_step(step, model=fa.distribute(PixelSet), optimizer=fa.adamw(3e-3))
        state = train_step.init(seed=0)
        # rank 0 reads and sends each rank its rows. The loss moves tensors to the device by itself
        shards = fa.shard(loader, dispatch=True, device_placement=False)
        for state, metrics in fa.scan(train_step, state, shards, epochs=args.epochs):
            if state.data.samples == 0:
                world.print(f"epoch {state.data.epoch}: loss {float(metrics['loss']):.4f}")


if __name__ == "__main__":
    main()
