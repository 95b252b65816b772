"""The rows of the parity matrix, and how one row is run; runs inside real ranks."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel.testing import count_collectives

# rows of each rank's batch: ragged, so that an average of averages is not the average
SIZES = (11, 7, 10, 8)
STEPS = 3
DECAY = 0.75
RATES = {"sgd": 0.3, "adamw": 0.02}


@attrs.frozen(kw_only=True)
class Row:
    """One cell of the matrix."""

    strategy: str
    precision: str = "fp32"
    accumulate: int = 1
    clip: float | None = None
    ranks: int = 1
    optimizer: str = "sgd"
    sync: str = "last"
    compile: bool = False
    remat: bool = False
    ema: bool = False

    def __str__(self) -> str:
        clip = "clip" if self.clip else "none"
        name = self.strategy.replace(" ", "").replace("reshard_after_forward=False", "zero2")
        sync = "" if self.sync == "last" else "-each"
        more = "".join(f"-{what}" for what in ("compile", "remat", "ema") if getattr(self, what))
        return (
            f"{name}-{self.precision}-acc{self.accumulate}{sync}-{clip}-{self.ranks}-{self.optimizer}{more}"
        )


class Block(nn.Module):
    """Odd sizes, so that shards are uneven."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Net(nn.Module):
    """A model small enough for a matrix; over four ranks, `out` leaves one rank without rows."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.out = nn.Linear(width, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def loss_fn(model: Any, batch: Any) -> fa.Mean:
    """A sum over the rows whose label is not masked, and their number: weights are ragged too."""
    logits = model(batch["tokens"])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    kept = batch["labels"] >= 0
    nll = F.cross_entropy(logits, batch["labels"].clamp(min=0), reduction="none")
    return fa.Mean((nll * kept).sum(), weight=kept.sum())


def rank_batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    """One rank's rows of one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 11, (SIZES[rank],), generator=generator)
    labels = torch.randint(0, 5, (SIZES[rank],), generator=generator)
    labels[:: 3 + rank] = -1
    return {"tokens": tokens, "labels": labels}


def global_batches(ranks: int) -> list[list[Any]]:
    """All ranks' rows of each step, for the oracle."""
    return [[rank_batch(step, rank) for rank in range(ranks)] for step in range(STEPS)]


def make_step(row: Row) -> Any:
    """The step of a row."""
    step: Any = loss_fn
    if row.precision == "fp64":
        step = fa.with_precision(step, fa.transforms.Precision(param="fp64", compute="fp64"))
    elif row.precision != "fp32":
        step = fa.with_precision(step, row.precision)
    if row.accumulate > 1:
        step = fa.accumulate(step, row.accumulate, sync=row.sync)
    if row.clip is not None:
        step = fa.clip_norm(step, row.clip)
    if row.remat:
        step = fa.remat(step)
    if row.ema:
        step = fa.with_ema(step, DECAY)
    if row.compile:
        step = fa.compile(step, backend="eager")
    return step


def make_optimizer(row: Row) -> fa.optim.Optimizer:
    """The optimizer of a row."""
    return getattr(fa, row.optimizer)(RATES[row.optimizer])


def whole(value: Any) -> torch.Tensor:
    """All of a parameter, on every rank."""
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().clone()


def run_row(row: Row) -> dict[str, Any]:
    """Losses, norms, parameters and the collectives of the last step, as fnaccel makes them."""
    train_step = fa.train_step(
        make_step(row), model=fa.distribute(Net, row.strategy), optimizer=make_optimizer(row)
    )
    state = train_step.init(seed=0)
    losses: list[float] = []
    norms: list[float] = []
    counts: dict[str, int] = {}
    for step in range(STEPS):
        batch = rank_batch(step, train_step.mesh.batch_rank)
        if step < STEPS - 1:
            state, metrics = train_step(state, batch)
        else:
            with count_collectives() as counted:
                state, metrics = train_step(state, batch)
            counts = dict(counted.counts)
        losses.append(float(metrics["loss"]))
        if "grad_norm" in metrics:
            norms.append(float(metrics["grad_norm"]))
    params = {name: whole(value) for name, value in state.params.items()}
    ema = {name: whole(value) for name, value in (state.ema or {}).items()}
    train_step.close()
    return {"losses": losses, "norms": norms, "params": params, "ema": ema, "counts": counts}
