"""A small GPT for the tests of model axes, and its plan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa

VOCABULARY, WIDTH, HEADS, LENGTH = 31, 16, 4, 8


class Block(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.heads = HEADS
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # the gradient of a key's bias is 0 but for rounding
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=bias), nn.Linear(4 * WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        rows = x.shape[0]
        q, k, v = self.qkv(self.norm1(x)).view(rows, -1, 3, self.heads, WIDTH // HEADS).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = {
    "embed": "vocab",
    "blocks.*.qkv": "packed_colwise:3",
    "blocks.*.heads": "/",
    "blocks.*.project": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather",
}
DIMS = {
    "embed.weight": 0,
    "blocks.*.qkv": "packed_colwise:3",
    "blocks.*.heads": "/",
    "blocks.*.project.weight": 1,
    "blocks.*.up.weight": 0,
    "blocks.*.down.weight": 1,
    "head": "colwise_gather",
}
"""The same plan: dimensions of weights in the place of styles."""
SEQUENCE = {
    "blocks.0": "scatter_input",
    "blocks.1": "gather_output",
    "blocks.*.norm?": "sequence",
} | PLAN
CUT_LOGITS = PLAN | {"head": "vocab"}


def loss_fn(model, tokens):
    logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return fa.Mean(total, weight=labels.numel())


def rows_of(step, rank, rows=None):
    """Tokens of another number of rows for each part of the batch."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCABULARY, (rows or (5, 3, 4, 2)[rank], LENGTH + 1), generator=generator)
