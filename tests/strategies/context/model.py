"""A tiny transformer whose attention is torch's, its batches, and how a strategy trains it on real ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel.testing import count_collectives
from tests.tiny_models import whole_params

STEPS, WIDTH, HEADS, WORDS = 3, 8, 4, 11
LENGTHS = (8, 16, 8)
CUT = {"tokens": 1, "labels": 1, "positions": 1, "keys": None}
LAYERS = 2
PLAN = {
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key_value": "packed_colwise:2",
    "blocks.*.attention.heads": "/",
    "blocks.*.attention.out": "rowwise",
}


class Attention(nn.Module):
    """Grouped queries: two heads of keys for four of queries. `mask` is the kind of mask that it makes."""

    def __init__(self, mask: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.mask, self.dropout, self.heads = mask, dropout, HEADS
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, batch):
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = self.key_value(x).unflatten(-1, (2, self.heads // 2, -1)).permute(2, 0, 3, 1, 4)
        visible = None
        if self.mask == "keys":
            visible = batch["keys"][:, None, None, :]
        elif self.mask == "rows":  # a window: this rank's rows by the keys of the whole sequence
            at = torch.arange(batch["keys"].shape[1])
            visible = (batch["positions"][:, :, None] - at).abs()[:, None] < 4
        elif self.mask == "added":
            visible = torch.where(batch["keys"], 0.0, -2.0)[:, None, None, :]
        mixed = F.scaled_dot_product_attention(
            query, key, value, visible, self.dropout, self.mask == "causal", scale=0.7, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mask: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(mask, dropout)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, batch):
        x = x + self.attention(self.norm(x), batch)
        return x + torch.tanh(self.mix(x))


class Net(nn.Module):
    def __init__(self, mask: str = "causal", dropout: float = 0.0, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(max(LENGTHS), WIDTH)
        self.blocks = nn.ModuleList(Block(mask, dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, batch):
        x = self.embed(batch["tokens"]) + self.place(batch["positions"])
        for block in self.blocks:
            x = block(x, batch)
        return self.head(x)


def loss_fn(model, batch):
    logits, labels = model(batch).flatten(0, 1).float(), batch["labels"].flatten()
    return fa.Mean(
        F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100), weight=(labels >= 0).sum()
    )


def batch_of(step, rank, lengths=LENGTHS, rows=None):
    """Ragged: each part of the batch has another number of rows, labels and visible keys."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    length, rows = lengths[step % len(lengths)], rows or 2 + rank
    labels = torch.randint(0, WORDS, (rows, length), generator=generator)
    labels[:, : 1 + rank] = -100
    keys = torch.rand(rows, length, generator=generator) < 0.7
    keys[:, 0] = True
    return {
        "tokens": torch.randint(0, WORDS, (rows, length), generator=generator),
        "labels": labels,
        "positions": torch.arange(length).expand(rows, -1).contiguous(),
        "keys": keys,
    }


def make_step(clip=None, precision=None, accumulate=1, remat=False, weigh=False, compiled=None):
    step = loss_fn
    if precision:
        step = fa.with_precision(step, precision)
    if weigh:
        step = fa.with_weight(step, lambda batch: (batch["labels"] >= 0).sum())
    if accumulate > 1:
        step = fa.accumulate(step, accumulate)
    if clip:
        step = fa.clip_norm(step, clip)
    if remat:
        step = fa.remat(step, save=remat if isinstance(remat, str) else "nothing")
    if compiled:
        step = fa.compile(step, compiled[0], backend=compiled[1])
    return step


def trained(strategy, mask="causal", save=None, lengths=LENGTHS, layers=LAYERS, **options):
    """Losses, norms, parameters, score, and the collectives of the last step."""
    train_step = fa.train_step(
        make_step(**options),
        model=fa.distribute(lambda: Net(mask, layers=layers), strategy),
        optimizer=fa.sgd(0.3),
    )
    state = train_step.init(seed=0)
    losses, norms, counts = [], [], {}
    for step in range(STEPS):
        batch = batch_of(step, train_step.mesh.batch_rank, lengths)
        with count_collectives() as counted:
            state, metrics = train_step(state, batch)
        counts = dict(counted.counts)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics.get("grad_norm", 0.0)))
    if save is not None:
        fa.save(save, state)
    score = fa.evaluate(train_step, state, loss_fn, fa.shard([batch_of(9, 0, lengths, rows=4)]))
    return losses, norms, whole_params(state), float(score), counts


def restored(strategy, path):
    """The parameters of a checkpoint under another strategy."""
    train_step = fa.train_step(loss_fn, model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.3))
    return whole_params(fa.restore(path, like=train_step.init(seed=1)))
