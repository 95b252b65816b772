"""Models of these tests: one with facts to match, random trees of modules, tiny transformers."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import nn


class Small(nn.Module):
    """236 bytes: 64, 72 and 100."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)
        if tied:
            self.linear1.weight = self.linear2.weight

    def forward(self, x):
        return self.linear2(self.batchnorm(self.linear1(x)))


class Block(nn.Module):
    """A residual block with a scale of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.up, self.drop, self.down = (
            nn.Linear(width, 2 * width),
            nn.Dropout(0.1),
            nn.Linear(2 * width, width),
        )

    def forward(self, x, *, extra=None):
        x = x + self.scale * self.down(self.drop(torch.tanh(self.up(x))))
        return x if extra is None else x + extra["bias"]


class Net(nn.Module):
    """An embedding, blocks, a norm with buffers, and a head that may be tied."""

    def __init__(self, width: int = 4, depth: int = 3, words: int = 11, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, words, bias=False)
        self.register_buffer("mask", torch.ones(width), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, extra=None):
        x = self.embed(tokens) * self.mask
        for block in self.blocks:
            x = block(x, extra=extra)
        return {"logits": self.head(self.norm(x))}


@st.composite
def nets(draw):
    """A `Net` of random sizes, in evaluation mode."""
    return Net(
        width=draw(st.integers(1, 6)),
        depth=draw(st.integers(0, 4)),
        words=draw(st.integers(1, 20)),
        tied=draw(st.booleans()),
    ).eval()
