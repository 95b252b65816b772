"""A denoising diffusion model (Ho et al. 2020) of digits, sampled from the average of its parameters.

    python examples/diffusion.py
    fnaccel launch -n 2 --strategy fsdp --precision bf16 examples/diffusion.py --dir runs/digits

The noise of a row comes from the key of its step and its number in the global batch, so the curve does not
depend on the number of ranks, and a resumed run has the same bits.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

import fnaccel as fa

LEVELS = 100
KEPT = torch.cumprod(1 - torch.linspace(1e-3, 0.08, LEVELS), 0)  # the share of the signal at each level


class Denoiser(nn.Module):
    """The noise in digits of shape [rows, 64], at levels of shape [rows]."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.level = nn.Embedding(LEVELS, width)
        self.inward, self.outward = nn.Linear(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )
            for _ in range(3)
        )

    def forward(self, x, level):
        x = self.inward(x)
        for block in self.blocks:
            x = x + block(x + self.level(level))
        return self.outward(x)


def drawn(info):
    """The level and the noise of each row."""
    keys = info.key.fold_in(info.rows)
    level = (LEVELS * fa.random.uniform(keys.fold_in(0))).long()
    return level, fa.random.normal(keys.fold_in(1), (64,))


def loss_fn(model, x, *, info):
    level, noise = drawn(info)
    kept = KEPT.to(x.device)[level][:, None]
    error = model(kept.sqrt() * x + (1 - kept).sqrt() * noise, level) - noise
    return fa.Mean(error.square().sum(), weight=error.numel())


def sample(model, key, rows):
    """Digits out of noise. Every rank draws the same."""
    x = fa.random.normal(key, (rows, 64))
    for level in reversed(range(LEVELS)):
        kept = KEPT[level]
        before = KEPT[level - 1] if level else torch.ones(())
        noise = model(x, torch.full((rows,), level))
        clean = ((x - (1 - kept).sqrt() * noise) / kept.sqrt()).clamp(-1, 1)
        step = 1 - kept / before
        mean = (before.sqrt() * step * clean + (kept / before).sqrt() * (1 - before) * x) / (1 - kept)
        spread = (step * (1 - before) / (1 - kept)).sqrt()
        x = mean + spread * fa.random.normal(key.fold_in(level), (rows, 64))
    return x


def digits():
    return torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--dir", help="save here, and go on from what is there")
    args = parser.parse_args(argv)
    save = fa.Autosave(args.dir, every=20, keep=2) if args.dir else None
    shards = fa.shard(DataLoader(digits(), batch_size=128, shuffle=True))
    with fa.start() as world:
        step = fa.with_ema(fa.clip_norm(loss_fn, 1.0), fa.schedules.ema_warmup(0.995))
        train_step = fa.train_step(step, model=fa.distribute(Denoiser), optimizer=fa.adamw(2e-3))
        state, losses = fa.resume_or_init(args.dir, train_step, seed=0), []
        for state, metrics in fa.scan(train_step, state, shards, steps=args.steps, save=save):
            losses.append(float(metrics["loss"]))
        with train_step.averaged(state):
            drawings = train_step.look(state, sample, fa.random.key(0), 4)
        nearest = torch.cdist(drawings.cpu(), digits()).min(1).values.mean()
        world.print(f"loss {losses[-1]:.3f}, mean distance of a drawing to the nearest digit: {nearest:.2f}")
        for line in (drawings.view(4, 8, 8) > 0).transpose(0, 1):
            world.print("   ".join("".join("#" if pixel else "." for pixel in row) for row in line))
        return losses, state


if __name__ == "__main__":
    main()
