"""The models and data that every contestant trains; all of them from the same seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import fnaccel as fa
from fnaccel.transforms.compilation import own_code

# a short warm-up: already the first losses differ if a contestant has another schedule
PEAK, WARMUP, TOTAL = 1e-3, 4, 1_000_000
VOCABULARY = 256


def mlp() -> nn.Module:
    """Six parameter tensors, so small that a step is Python and dispatch."""
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))


def deep(leaves: int) -> nn.Module:
    """A chain of tiny layers with `leaves` parameter tensors (an even number)."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(leaves // 2)))


def rows(count: int = 4096, width: int = 16, classes: int = 8) -> TensorDataset:
    """Random rows and classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, width, generator=generator)
    return TensorDataset(x, torch.randint(classes, (count,), generator=generator))


class Pairs(Dataset):
    """The same rows from a class of the user's own, so that nothing can be read column by column."""

    def __init__(self, source: TensorDataset) -> None:
        self.x, self.y = source.tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def tokens(count: int = 2048, length: int = 64) -> TensorDataset:
    """Random token rows, of which the labels are the next token."""
    drawn = torch.randint(VOCABULARY, (count, length + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(count, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(count, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT of 41 parameter tensors; about 187,000 parameters."""

    block: Any = Block

    def __init__(self, width: int = 64, layers: int = 3, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(self.block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt_of_its_own(**options: Any) -> Callable[[], GPT]:
    """A factory of `GPT`s whose code no other contestant shares.

    torch keeps what it compiled with the code object, so contestants would otherwise use each other's
    graphs, and each other's limit of recompilations.
    """
    block = type("Block", (Block,), {"forward": own_code(Block.forward)})
    kind = type("GPT", (GPT,), {"forward": own_code(GPT.forward), "block": block})
    return lambda: kind(**options)


def peer_loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean loss, as hand-written loops have it."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def our_loss(model: Any, batch: Any) -> fa.Mean:
    """The same as a total and its weight."""
    x, y = batch
    return fa.Mean(F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum"), weight=y.numel())


def rate(update: int) -> float:
    """Warm-up from 0 and cosine as a factor of the peak rate: `fa.warmup_cosine`, written by hand."""
    if update < WARMUP:
        return update / WARMUP
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (update - WARMUP) / (TOTAL - WARMUP))))


def our_optimizer() -> Any:
    """AdamW under the same schedule."""
    return fa.adamw(lr=fa.warmup_cosine(PEAK, warmup=WARMUP, total=TOTAL))
