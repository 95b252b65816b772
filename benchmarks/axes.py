"""The cost of a train step whose model, or whose sequences, are cut over two ranks.

    OMP_NUM_THREADS=1 python benchmarks/axes.py [--only tensor,context] [--quick]

Tensor parallelism is compared with torch's `parallelize_module` by hand, on the same GPT of 6 layers and
width 256. Context parallelism is compared with the whole model on every rank, each with half of the rows
(`ddp`): the same tokens for each update. All contestants must reach the same losses first. The slope is the
cost of each further layer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from interleave import Samples, race_steps, slopes
from models import VOCABULARY, our_loss, peer_loss, tokens
from options import Options, begin
from report import Row, compare, publish
from torch import nn
from torch.utils.data import DataLoader

import fnaccel as fa
from fnaccel.testing import RankPool

PARTS = ("tensor", "context")
RANKS, ROWS, WIDTH, HEADS, LAYERS, RATE = 2, 8, 256, 8, 6, 1e-3
SWEPT = (2, 4, 6)
LONG = 512  # tokens of a row that ranks share
HAND = "parallelize_module by hand"


class Block(nn.Module):
    """One transformer block with query, key and value apart, as torch's own plans expect it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q(h), self.k(h), self.v(h))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT of 4.9 million parameters with 6 layers."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONG, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, text: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        positions = torch.arange(text.shape[1]) if positions is None else positions
        x = self.embed(text) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = {
    "embed": "vocab",
    "blocks.*.[qkv]": "colwise",
    "blocks.*.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather",
}


def ours(strategy: Any, layers: int = LAYERS) -> Iterator[torch.Tensor]:
    """fnaccel under a strategy."""
    train_step = fa.train_step(
        our_loss, model=fa.distribute(lambda: GPT(layers), strategy), optimizer=fa.adamw(RATE)
    )
    state = train_step.init(seed=0)
    shards = fa.shard(DataLoader(tokens(), batch_size=ROWS))
    for state, metrics in fa.scan(train_step, state, shards, epochs=1_000_000):  # noqa: B007, B020
        yield metrics["loss"]


def by_hand(*, fused: bool, layers: int = LAYERS) -> Iterator[torch.Tensor]:
    """torch's `parallelize_module`: parameters are DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = GPT(layers)
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(layers):
        for name in ("q", "k", "v", "up"):
            plan[f"blocks.{number}.{name}"] = ColwiseParallel()
        for name in ("o", "down"):
            plan[f"blocks.{number}.{name}"] = RowwiseParallel()
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    params = list(model.parameters())
    cut = [param for param in params if hasattr(param, "placements")]
    whole = [param for param in params if not hasattr(param, "placements")]
    # lists of DTensors and plain tensors can't be mixed
    optimizer = torch.optim.AdamW([{"params": cut}, {"params": whole}], lr=RATE, fused=fused or None)
    while True:
        for x, y in DataLoader(tokens(), batch_size=ROWS):
            optimizer.zero_grad(set_to_none=True)
            loss = peer_loss(model, x, y)
            loss.backward()
            optimizer.step()
            yield loss.detach()


def measure_tensor(blocks: int, calls: int, layers: int) -> Samples:
    """Seconds per update on this rank."""
    loops = {
        "fnaccel": ours(fa.tensor(RANKS, PLAN), layers),
        HAND: by_hand(fused=True, layers=layers),
        f"{HAND}, AdamW's default": by_hand(fused=False, layers=layers),
        "fnaccel, ddp": ours(fa.ddp(RANKS), layers),
    }
    return race_steps(loops, check=4, blocks=blocks, calls=calls)


def tensor_rows(pool: RankPool, options: Options) -> list[Row]:
    """A step at several numbers of layers, and the slope."""
    table: list[Row] = []
    measured: list[Samples] = []
    swept = options.pick(SWEPT, SWEPT, (1, 2))
    blocks, calls = options.pick(15, 3, 1), options.pick(3, 3, 1)
    for layers in swept:
        measured.append(pool.run(measure_tensor, blocks, calls, layers)[0])
        goals = {HAND: 1.0} if layers == swept[-1] else {}
        table += compare(f"tensor(2), {layers} layers, {ROWS} x 64 tokens", measured[-1], goals, "ms")
    return table + compare("slope: tensor(2), each further layer", slopes(swept, measured), unit="ms")


def long_rows(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows with the positions of their tokens."""
    text = torch.stack(rows)
    return {
        "text": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "positions": torch.arange(LONG).repeat(len(rows), 1),
    }


def long_loss(model: Any, batch: Any) -> fa.Mean:
    """The loss of each token."""
    logits, labels = model(batch["text"], batch["positions"]).flatten(0, 1), batch["labels"].flatten()
    return fa.Mean(F.cross_entropy(logits, labels, reduction="sum"), weight=labels.numel())


def on_long_rows(strategy: Any, layers: int) -> Iterator[torch.Tensor]:
    """fnaccel on rows of 512 tokens."""
    model = fa.distribute(lambda: GPT(layers), strategy)
    train_step = fa.train_step(long_loss, model=model, optimizer=fa.adamw(RATE))
    state = train_step.init(seed=0)
    text = torch.randint(VOCABULARY, (64, LONG + 1), generator=torch.Generator().manual_seed(1))
    shards = fa.shard(DataLoader(list(text), batch_size=2, collate_fn=long_rows))
    for state, metrics in fa.scan(train_step, state, shards, epochs=1_000_000):  # noqa: B007, B020
        yield metrics["loss"]


def measure_context(blocks: int, layers: int) -> Samples:
    """Seconds per update on this rank."""
    cut = {"text": 1, "labels": 1, "positions": 1}
    strategies = {
        "fnaccel": fa.context(RANKS, cut),
        "fnaccel, ring": fa.context(RANKS, cut, "ring"),
        "fnaccel, heads": fa.context(RANKS, cut, "heads"),
        "fnaccel, ddp on whole rows": fa.ddp(RANKS),
    }
    loops = {name: on_long_rows(strategy, layers) for name, strategy in strategies.items()}
    return race_steps(loops, check=4, blocks=blocks, calls=1)


def context_rows(pool: RankPool, options: Options) -> list[Row]:
    """A step of 2 rows, whose tokens two ranks share."""
    layers = options.pick(LAYERS, LAYERS, 1)
    samples = pool.run(measure_context, options.pick(15, 3, 1), layers)[0]
    what = f"context(2), {layers} layers, 2 x {LONG} tokens"
    return compare(what, samples, {"fnaccel, ddp on whole rows": 1.25}, "ms")


def main() -> None:
    """Run the parts asked for."""
    options = begin("axes", __doc__, PARTS)
    table: list[Row] = []
    with RankPool(RANKS, timeout=600.0) as pool:
        if "tensor" in options.parts:
            table += tensor_rows(pool, options)
        if "context" in options.parts:
            table += context_rows(pool, options)
    publish(options, table)


if __name__ == "__main__":
    main()
