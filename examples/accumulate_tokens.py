"""A token-weighted loss is the same however the batch is split.

    python examples/accumulate_tokens.py
    fnaccel launch -n 2 --strategy ddp examples/accumulate_tokens.py

Sentences differ in length, so micro-batches and ranks differ in tokens. A mean of means would depend on the
split. A total and its weight do not. It takes the place of two scripts of Accelerate:
by_feature/gradient_accumulation.py and by_feature/gradient_accumulation_for_autoregressive_models.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa

PAD = 0


def sentences(rows: int = 48, longest: int = 9) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, longest + 1, (rows,), generator=generator)
    tokens = torch.randint(1, 20, (rows, longest + 1), generator=generator)
    tokens[torch.arange(longest + 1)[None] > lengths[:, None]] = PAD
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def loss_fn(model, batch):
    logits, labels = model(batch["tokens"]), batch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=PAD)
    return fa.Mean(total, weight=(labels != PAD).sum())


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))


def train(splits: int) -> float:
    step = fa.accumulate(loss_fn, splits)
    train_step = fa.train_step(step, model=fa.distribute(model), optimizer=fa.sgd(0.5))
    state = train_step.init(seed=0)
    batch = fa.split_between_processes(sentences())  # without fa.shard a batch is this rank's
    for _ in range(20):
        state, metrics = train_step(state, batch)
    return float(metrics["loss"])


def main() -> None:
    with fa.start() as world:
        losses = {splits: train(splits) for splits in (1, 2, 3, 5, 12)}
        for splits, loss in losses.items():
            world.print(f"{splits:>2} micro-batches: loss {loss:.6f}")
        spread = max(losses.values()) - min(losses.values())
        world.print(f"largest difference: {spread:.1e}")


if __name__ == "__main__":
    main()
