"""A small causal transformer, and a way to see which operations ran."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fnaccel as fa

FLASH = "_scaled_dot_product_flash_attention_for_cpu"  # the operation that torch calls on the CPU


class Attend(nn.Module):
    """Self-attention of two heads over `[rows, tokens, 8]`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Two blocks of one class."""

    block: ClassVar[type[nn.Module]] = Attend

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model, x):
    return fa.Mean(model(x).square().sum(), weight=x.numel())


class Seen(TorchDispatchMode):
    """The names of the operations that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
