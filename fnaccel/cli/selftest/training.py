"""Three steps of a small model under each strategy, and a checkpoint on another number of ranks."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fnaccel as fa
from fnaccel.cli.selftest.results import CheckFailedError, NotAvailableError
from fnaccel.cli.selftest.running import Ranks, on_ranks
from fnaccel.step.choices import PrecisionName

STEPS = 3
TOLERANCE = 1e-4
"""The largest relative difference of a loss from that of one process, on CPUs and for TF32 on cards."""
_HEADS, _WIDTH, _ROWS = 8, 32, 12


class Attention(nn.Module):
    """Causal self-attention with all heads of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = _HEADS
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states of shape `[rows, length, width]`, for the same."""
        rows, length, _ = x.shape
        cut = self.qkv(x).view(rows, length, 3, self.heads, -1).transpose(1, 3)
        mixed = F.scaled_dot_product_attention(cut[:, :, 0], cut[:, :, 1], cut[:, :, 2], is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    """Attention and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up, self.down = Attention(), nn.Linear(_WIDTH, 64), nn.Linear(64, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states of shape `[rows, length, width]`, for the same."""
        x = x + self.mix(x)
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """A decoder that every strategy can share."""

    tp_plan: ClassVar = {
        "blocks.*.mix.qkv": "packed_colwise:3",
        "blocks.*.mix.heads": "/",
        "blocks.*.mix.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, _WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(_WIDTH, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens of shape `[rows, length]`, for logits of shape `[rows, length, 64]`."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> fa.Mean:
    """Cross entropy of the next token."""
    logits, labels = model(batch["input_ids"]).flatten(0, 1).float(), batch["labels"].flatten()
    return fa.Mean(F.cross_entropy(logits, labels, reduction="sum"), weight=len(labels))


def train(strategy: str, precision: PrecisionName, steps: int, folder: Path | None) -> list[float]:
    """In a rank: train, from the checkpoint in the folder if it has one. Returns the losses.

    The state is saved there after the last step.
    """
    with fa.start():
        rows = torch.randint(64, (_ROWS * STEPS, 17), generator=torch.Generator().manual_seed(0))
        samples: Any = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
        loader: Any = DataLoader(samples, batch_size=_ROWS)
        step = loss_fn if precision == "fp32" else fa.with_precision(loss_fn, precision)
        train_step = fa.train_step(
            fa.clip_norm(step, 1.0), model=fa.distribute(Model, strategy), optimizer=fa.adamw(1e-2)
        )
        begin = fa.resume_or_init(folder, train_step)
        run = fa.scan(train_step, begin, fa.shard(loader), steps=steps, save=folder)
        return [float(metrics["loss"]) for _, metrics in run]


def train_anew(folder: Path) -> list[float]:
    """In a rank: train all steps but the last under fsdp, without the files of an earlier test."""
    with fa.start() as world:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        world.barrier()
        return train("fsdp", "fp32", STEPS - 1, folder)


def reference(cpu: bool) -> list[float]:
    """The losses of one process.

    Raises:
        CheckFailedError: it failed.
    """
    return on_ranks(Ranks(processes=1, cpu=cpu), train, "local", "fp32", STEPS, None)[0]


def check_strategy(text: str, ranks: Ranks, expected: list[float]) -> str:
    """Train three steps under a strategy, and compare the losses.

    Args:
        text: the strategy.
        ranks: of the run.
        expected: the losses of one process.

    Raises:
        NotAvailableError: the strategy's package is not installed.
        CheckFailedError: a loss differs, or ranks failed.
    """
    package = {"deepspeed": "deepspeed", "xla": "torch_xla"}.get(text.partition("(")[0])
    if package is not None and importlib.util.find_spec(package) is None:
        raise NotAvailableError(f"{package} is not installed")
    if text == "xla":
        raise NotAvailableError("one process drives all devices: fnaccel launch --tpu")
    return _compare(on_ranks(ranks, train, text, "fp32", STEPS, None)[0], expected)


def check_checkpoint(ranks: Ranks, expected: list[float], shared: Path | None) -> str:
    """Save under fsdp after two steps, and take the third under another strategy, on fewer ranks if possible.

    Raises:
        NotAvailableError: several machines, and no folder that they share.
        CheckFailedError: the third loss differs, or ranks failed.
    """
    if ranks.nodes > 1 and shared is None:
        raise NotAvailableError("several machines need a folder that they share: --folder")
    fewer = attrs.evolve(ranks, processes=max(1, ranks.processes // 2))
    with tempfile.TemporaryDirectory(prefix="fnaccel-test-") as name:
        folder = Path(name if shared is None else shared / ".fnaccel-test")
        try:
            losses = on_ranks(ranks, train_anew, folder)[0]
            losses += on_ranks(fewer, train, "ddp", "fp32", STEPS, folder)[0]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return f"saved by {ranks.size}, restored by {fewer.size}: {_compare(losses, expected)}"


def _compare(losses: list[float], expected: list[float], tolerance: float = TOLERANCE) -> str:
    gap = max((abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=False)), default=float("inf"))
    if len(losses) != len(expected) or not gap <= tolerance:
        raise CheckFailedError(f"losses {_text(losses)}, and one process has {_text(expected)}")
    return f"losses as one process, within {gap:.0e}" if gap else "the losses of one process, bit for bit"


def _text(losses: list[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)
