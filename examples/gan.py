"""Two models, two programs in one loop: a GAN on scikit-learn's digits.

    python examples/gan.py
    fnaccel launch -n 2 --strategy ddp examples/gan.py

Each program has its own model, optimizer and accumulation, and borrows the other's model for a
call: `given=` lends it without donating its state or training it.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def discriminator_loss(disc, batch, given):
    images, noise = batch
    with torch.no_grad():
        fake = given["gen"](noise)
    real_logits, fake_logits = disc(images), disc(fake)
    total = F.softplus(-real_logits).sum() + F.softplus(fake_logits).sum()
    return fa.Mean(total, weight=len(images))


def generator_loss(gen, batch, given):
    _, noise = batch
    return fa.Mean(F.softplus(-given["disc"](gen(noise))).sum(), weight=len(noise))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16.0
    noise = torch.randn(len(images), 16, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(images, noise), batch_size=96, shuffle=True, drop_last=True)

    with fa.start() as world:
        disc_step = fa.train_step(
            fa.accumulate(discriminator_loss, 3),
            model=fa.distribute(discriminator),
            optimizer=fa.adam(2e-3, betas=(0.5, 0.999)),
        )
        gen_step = fa.train_step(
            fa.clip_norm(generator_loss, 1.0),
            model=fa.distribute(generator),
            optimizer=fa.adam(2e-3, betas=(0.5, 0.999)),
        )
        disc, gen = disc_step.init(seed=1), gen_step.init(seed=2)
        shards = fa.shard(loader)
        while disc.data.epoch < args.epochs:
            for batch in shards.at(disc.data):
                disc, disc_metrics = disc_step(disc, batch, given={"gen": gen})
                gen, gen_metrics = gen_step(gen, batch, given={"disc": disc})
            world.print(
                f"epoch {disc.data.epoch}: discriminator {float(disc_metrics['loss']):.3f}, "
                f"generator {float(gen_metrics['loss']):.3f}"
            )


if __name__ == "__main__":
    main()
