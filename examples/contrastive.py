"""Contrastive learning over the rows of all ranks, as in CLIP (Radford et al. 2021), of halves of digits.

    python examples/contrastive.py
    fnaccel launch -n 2 --strategy fsdp examples/contrastive.py --dir runs/halves

Each rank compares its rows with those of all ranks, and `fa.gather(gradient=True)` brings the gradient of the
others' losses back: the curve is that of one process. SimCLR has the same loss, of two views.
"""

from __future__ import annotations

import argparse
import functools

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa


def data() -> tuple[TensorDataset, TensorDataset]:
    """The upper and the lower half of each digit, shapes [32]: 1,500 to train on, and 297."""
    pixels = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    upper, lower = pixels[:, :32], pixels[:, 32:]
    return TensorDataset(upper[:1500], lower[:1500]), TensorDataset(upper[1500:], lower[1500:])


class Encoders(nn.Module):
    """Two encoders into one space, and a temperature that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.upper = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.lower = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, batch):
        upper, lower = batch
        return F.normalize(self.upper(upper), dim=-1), F.normalize(self.lower(lower), dim=-1)


def contrast_of(upper, lower, scale, info):
    """The sum over this rank's rows, each among the rows of all ranks. A row finds its pair by its number."""
    own = {"upper": upper, "lower": lower, "row": info.rows}
    everyone = fa.gather(own, valid=info.valid.sum(), gradient=True)
    pair = (info.rows[:, None] == everyone["row"]).int().argmax(1)
    down = F.cross_entropy(scale.exp() * upper @ everyone["lower"].T, pair, reduction="none")
    up = F.cross_entropy(scale.exp() * lower @ everyone["upper"].T, pair, reduction="none")
    return ((down + up) / 2)[info.valid].sum()


def contrast(model, batch, *, info):
    """Under `fa.accumulate` each micro-batch has its own negatives."""
    return fa.Mean(contrast_of(*model(batch), model.scale, info), weight=info.valid.sum())


def cached(model, batch):
    """The same gradient as of the whole batch, however many micro-batches (Gao et al. 2021): see `cache`."""
    upper, lower = model(batch["data"])
    total = (upper * batch["upper"]).sum() + (lower * batch["lower"]).sum()
    aux = {"contrast": fa.Mean(batch["loss"].sum(), weight=len(upper))}
    return fa.Mean(total + (model.scale * batch["scale"]).sum(), weight=len(upper), aux=aux)


def cache(train_step, state, batch):
    """A first pass without a graph, and the gradients of the loss by embeddings, which `cached` hands on."""
    info = train_step.loss_info(state, batch)
    upper, lower, scale = train_step.look(
        state, lambda model, data: (*model(data), model.scale.clone()), batch.data
    )
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in (upper, lower, scale)]
        total = contrast_of(*leaves, info)
        by_upper, by_lower, by_scale = torch.autograd.grad(total, leaves)
    share = upper.new_ones(len(upper)) / max(int(info.valid.sum()), 1)  # of each row
    found = {"upper": by_upper, "lower": by_lower, "scale": share * by_scale, "loss": share * total.detach()}
    return batch.replace({"data": batch.data, **found})


def embed(model, batch):
    """The embeddings of all held-out rows, on all ranks."""
    upper, lower = model(batch)
    return {"upper": fa.Concat(upper), "lower": fa.Concat(lower)}


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="end after so many updates")
    parser.add_argument("--dir", help="save here, and go on from what is there")
    parser.add_argument("--cache", type=int, metavar="N", help="N micro-batches, all rows as negatives")
    args = parser.parse_args(argv)
    save = fa.Autosave(args.dir, every=20, keep=2) if args.dir else None
    train, test = data()
    shards = fa.shard(DataLoader(train, batch_size=128, shuffle=True))
    with fa.start() as world:
        step = fa.accumulate(cached, args.cache) if args.cache else contrast
        train_step = fa.train_step(step, model=fa.distribute(Encoders), optimizer=fa.adamw(3e-3))
        state, losses = fa.resume_or_init(args.dir, train_step, seed=0), []
        length = {"steps": args.steps} if args.steps else {"epochs": args.epochs}
        before = functools.partial(cache, train_step) if args.cache else None
        for state, metrics in fa.scan(train_step, state, shards, **length, before=before, save=save):
            losses.append(float(metrics["contrast" if args.cache else "loss"]))
        found = fa.evaluate(train_step, state, embed, fa.shard(DataLoader(test, batch_size=100)))
        right = (found["upper"] @ found["lower"].T).topk(10).indices == torch.arange(len(test))[:, None]
        share = float(right.any(1).float().mean())
        world.print(f"loss {losses[-1]:.3f}, the other half is among the first 10 of 297: {share:.2f}")
        return losses, state


if __name__ == "__main__":
    main()
