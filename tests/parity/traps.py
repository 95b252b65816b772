"""Ordinary PyTorch that once trained wrongly without a word: a model, a loss and their oracle for each kind.

Runs inside real ranks. A row is the raw loop's numbers, or an error by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.world.world import current

STEPS = 3
SIZES = (5, 3)  # rows of each rank's batch: ragged
RATES = {"sgd": 0.1, "adamw": 0.02}


@attrs.frozen(kw_only=True)
class Trap:
    """A model and a loss, trained here and by the oracle.

    Attributes:
        make: the factory of the model.
        loss: `loss(model, batch)`, of rows of three features and a number.
        options: of the optimizer.
        step: the transforms around the loss that the oracle needs not have.
        between: called with (train_step, state) after each step. Changes no parameter.
        refused: the message of the error at `init`, by strategy and "eager" or "compiled".
    """

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Any]
    options: Mapping[str, Any] = attrs.field(factory=dict)
    step: Callable[[Any], Any] = lambda loss: loss
    between: Callable[[Any, Any], Any] | None = None
    refused: Mapping[tuple[str, str], str] = attrs.field(factory=dict)


def rank_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(SIZES[rank], 3, generator=generator)
    return x, x.sum(dim=1, keepdim=True).sin()


def squares(model: Any, batch: Any) -> fa.Mean:
    x, y = batch
    difference = model(x) - y
    return fa.Mean(difference.abs().square().sum(), weight=len(y))


class Gaps(nn.Module):
    """A parameter that is a column of a larger tensor, and a buffer that is the others."""

    def __init__(self) -> None:
        super().__init__()
        columns = torch.randn(3, 4)
        self.weight = nn.Parameter(columns[:, :1])
        self.register_buffer("neighbours", columns[:, 1:])
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias + 0.1 * (x @ self.neighbours).sum(dim=1, keepdim=True)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.out = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((x.to(torch.complex64) @ self.weight).abs())


class Scalars(nn.Module):
    """A parameter without dimensions, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.scale + self.none.sum()


def in_evaluation_mode() -> nn.Module:
    """A frozen batch norm and a dropout that is off, under a root in training mode."""
    body = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.9)).eval()
    return nn.Sequential(body, nn.Linear(6, 1))


def evaluated(train_step: Any, state: Any) -> None:
    rows = TensorDataset(*rank_batch(9, 0))
    fa.evaluate(train_step, state, squares, fa.shard(DataLoader(rows, batch_size=4)))


NOT_FSDP = "fsdp shards real, contiguous parameters"
NO_GRAPH = "and the step is captured as one graph"
NO_GAPS = {("fsdp", "eager"): NOT_FSDP, ("local", "compiled"): NO_GRAPH, ("ddp", "compiled"): NO_GRAPH}
TRAPS = {
    "gaps": Trap(make=Gaps, loss=squares, refused=NO_GAPS),
    "gaps, momentum": Trap(
        make=Gaps,
        loss=squares,
        options={"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        refused=NO_GAPS,
    ),
    "complex": Trap(make=Complex, loss=squares, refused=NO_GAPS | {("fsdp", "compiled"): NOT_FSDP}),
    "scalars": Trap(make=Scalars, loss=squares),
    "evaluation mode": Trap(make=in_evaluation_mode, loss=squares, between=evaluated),
}


def run_trap(name: str, strategy: str, optimizer: str, compiled: bool) -> dict[str, Any]:
    """Losses, parameters and buffers, as fnaccel makes them."""
    trap, world = TRAPS[name], current()
    step = trap.step(trap.loss)
    train_step = fa.train_step(
        fa.compile(step, backend="eager") if compiled else step,
        model=fa.distribute(trap.make, strategy),
        optimizer=getattr(fa, optimizer)(RATES[optimizer], **trap.options),
    )
    try:
        with warnings.catch_warnings():  # of modules that stay in evaluation mode
            warnings.simplefilter("ignore", UserWarning)
            state = train_step.init(seed=0)
        losses: list[float] = []
        for number in range(STEPS):
            state, metrics = train_step(state, rank_batch(number, world.rank))
            losses.append(float(metrics["loss"]))
            if trap.between is not None:
                trap.between(train_step, state)
        named = {"params": state.params, "buffers": state.buffers}
        whole = {
            kind: {name: fa.tree.whole(value).detach().clone() for name, value in values.items()}
            for kind, values in named.items()
        }
        return {"losses": losses, **whole}
    finally:
        train_step.close()
