"""Ordinary PyTorch that once trained wrongly without a word: a model, a loss and their oracle for each kind.

Runs inside real ranks. A row is the raw loop's numbers, or an error by name. What raw PyTorch has not is held
beside its code: averages in 16 bits (`transforms/test_averaging.py`), 8-bit moments (`optim/test_eight_bit.py`),
numbers in groups and points of evaluation (`optim/test_numbers_of_groups.py`, `test_evaluation_point.py`),
tensor plans (`axes/test_probe.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import attrs
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

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
        batch: the rows of a rank in a step.
        precision: of `fa.with_precision`, and of the oracle's autocast. None is a step without it.
        ring: whether the batches are one buffer that the loader of each rank fills again.
        strategies: those with one meaning for the trap.
        refused: the message of an error, by strategy and "eager" or "compiled".
    """

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Any]
    options: Mapping[str, Any] = attrs.field(factory=dict)
    step: Callable[[Any], Any] = lambda loss: loss
    between: Callable[[Any, Any], Any] | None = None
    batch: Callable[[int, int], Any] = lambda step, rank: rank_batch(step, rank)
    precision: Literal["fp32", "bf16"] | None = None
    ring: bool = False
    strategies: tuple[str, ...] = ("local", "ddp", "fsdp")
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


class Hooked(nn.Module):
    """Backward hooks that clamp: the gradient of a sum is cut where that of a mean is not."""

    def __init__(self, *, on: str) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 6)
        self.out = nn.Linear(6, 1)
        if on == "parameter":  # the hook of a rank sees its summand only
            self.inp.weight.register_hook(lambda grad: grad.clamp(-0.05, 0.05))
        else:
            self.out.register_full_backward_pre_hook(lambda _, grads: (grads[0].clamp(-0.02, 0.02),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.inp(x)))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.out = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((x.to(torch.complex64) @ self.weight).abs())


class Rotary(nn.Module):
    """A rotary table of complex numbers, a complex buffer that moves, and digits that only fp64 has."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(3, 4), nn.Linear(4, 1)
        self.register_buffer("table", torch.polar(torch.ones(2), torch.tensor([0.5, 1.5])))
        self.register_buffer("turned", torch.zeros((), dtype=torch.complex64))
        self.register_buffer("wide", torch.tensor(1e8 + 0.25, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.inp(x).float().unflatten(-1, (2, 2))) * self.table
        if self.training:
            self.turned += self.table.sum()
        return self.out(torch.view_as_real(pairs).flatten(1)) * (self.wide - 1e8).float()


class Scalars(nn.Module):
    """A parameter without dimensions, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.scale + self.none.sum()


class Experts(nn.Module):
    """Weights of three experts in one tensor: two ranks can't cut it along its first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 8))
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.einsum("ri,eio->ro", x, self.weight).tanh())


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 1))


def compiled_parts() -> Any:
    """For the train step its paths are those of the plain model."""
    model = nn.Sequential(nn.Linear(3, 6), torch.compile(nn.Linear(6, 1), backend="eager"))
    return torch.compile(model, backend="eager")


FROZEN: list[nn.Module] = []


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 1))
    model[0].requires_grad_(requires_grad=False)
    FROZEN[:] = [model]
    return model


def unfrozen(train_step: Any, state: Any) -> None:
    FROZEN[0].requires_grad_(requires_grad=True)


def mean_as_total(model: Any, batch: Any) -> fa.Mean:
    x, y = batch
    mean = nn.functional.mse_loss(model(x), y) + 0.01 * sum(p.square().sum() for p in model.parameters())
    return fa.Mean(mean, weight=len(y))


TEMPERATURES: list[Iterator[float]] = []
"""What a loss draws from, once a call. Nothing can put an item back into a generator."""


def with_temperatures() -> nn.Module:
    TEMPERATURES[:] = [(1.0 / (1 + number) for number in range(9))]
    return nn.Linear(3, 1)


def at_a_temperature(model: Any, batch: Any) -> fa.Mean:
    loss = squares(model, batch)
    return fa.Mean(loss.total * next(TEMPERATURES[0]), weight=loss.weight)


def marked(step: int, rank: int) -> Any:
    """As many numbers in each row as rows: are the inner lists columns of the batch, or its rows?"""
    x, y = rank_batch(step, rank)
    return {"x": x, "y": y, "marks": [[1.0] * len(x) for _ in x]}


def of_marked(model: Any, batch: Any) -> fa.Mean:
    return squares(model, (batch["x"], batch["y"]))


def with_metadata(step: int, rank: int) -> Any:
    """A dict a row, without tensors: the weight of row 2 is that of row 0 if the list goes to each part."""
    x, y = rank_batch(step, rank)
    return {"x": x, "y": y, "meta": [{"weight": 1.0 + number} for number in range(len(x))]}


def by_metadata(model: Any, batch: Any) -> fa.Mean:
    weights = torch.tensor([row["weight"] for row, _ in zip(batch["meta"], batch["x"], strict=False)])
    squared = (model(batch["x"]) - batch["y"]).square().flatten()
    return fa.Mean((weights * squared).sum(), weight=len(squared))


FOREIGN = nn.Parameter(torch.ones(3, 1))


def of_foreign(model: Any, batch: Any) -> fa.Mean:
    x, y = batch
    return fa.Mean((x @ FOREIGN - y).square().sum(), weight=len(y))


KEPT: list[dict[str, torch.Tensor]] = []


def keeping() -> nn.Module:
    KEPT.clear()
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def of_kept(model: Any, batch: Any) -> fa.Mean:
    """The parameters of the first call are those of the model."""
    x, y = batch
    if not KEPT:
        KEPT.append(fa.params(model))
    both = (fa.call(model, KEPT[0], x) - y).square() + (model(x) - y).square()
    return fa.Mean(both.sum(), weight=len(y))


class Ring(IterableDataset[Any]):
    """The batches of a rank, in one buffer."""

    def __init__(self, batch: Callable[[int, int], Any]) -> None:
        self.batch, self.buffers = batch, fa.tree.map(torch.clone, batch(0, current().rank))

    def __iter__(self) -> Iterator[Any]:
        for number in range(STEPS):
            for buffer, values in zip(self.buffers, self.batch(number, current().rank), strict=True):
                buffer.copy_(values)
            yield self.buffers


def in_evaluation_mode() -> nn.Module:
    """A frozen batch norm and a dropout that is off, under a root in training mode."""
    body = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.9)).eval()
    return nn.Sequential(body, nn.Linear(6, 1))


def evaluated(train_step: Any, state: Any) -> None:
    rows = TensorDataset(*rank_batch(9, 0))
    fa.evaluate(train_step, state, squares, fa.shard(DataLoader(rows, batch_size=4)))


NOT_FSDP = "fsdp shards real, contiguous parameters"
NO_GRAPH = "and the step is captured as one graph"
NO_HOOKS = dict.fromkeys([(name, "compiled") for name in ("local", "ddp", "fsdp")], "would never run")
EVERYWHERE = [(name, mode) for name in ("local", "ddp", "fsdp") for mode in ("eager", "compiled")]
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
    "complex in bf16": Trap(
        make=Complex, loss=squares, precision="bf16", refused=NO_GAPS | {("fsdp", "compiled"): NOT_FSDP}
    ),
    "complex buffers": Trap(make=Rotary, loss=squares, precision="fp32"),
    "complex buffers in bf16": Trap(make=Rotary, loss=squares, precision="bf16"),
    "module hooks": Trap(make=lambda: Hooked(on="module"), loss=squares, refused=NO_HOOKS),
    "parameter hooks": Trap(
        make=lambda: Hooked(on="parameter"),
        loss=squares,
        strategies=("local", "fsdp"),
        refused=NO_HOOKS | {("fsdp", "eager"): "would never run"},
    ),
    "module hooks, two micro-batches": Trap(
        make=lambda: Hooked(on="module"),
        loss=squares,
        step=lambda loss: fa.accumulate(fa.with_weight(loss, lambda batch: len(batch[0])), 2),
        refused=NO_HOOKS,
    ),
    "scalars": Trap(make=Scalars, loss=squares),
    "evaluation mode": Trap(make=in_evaluation_mode, loss=squares, between=evaluated),
    "a reused buffer": Trap(make=lambda: nn.Linear(3, 1), loss=squares, ring=True),
    "experts": Trap(make=Experts, loss=squares),
    "batch norm": Trap(
        make=batch_norm,
        loss=squares,
        step=fa.transforms.sync_batch_norm,
        refused=dict.fromkeys(
            [(name, "compiled") for name in ("local", "ddp", "fsdp")], "middle of a forward"
        ),
    ),
    "unfrozen after init": Trap(
        make=frozen, loss=squares, between=unfrozen, refused=dict.fromkeys(EVERYWHERE, "would not be trained")
    ),
    "a mean as a total": Trap(
        make=lambda: nn.Linear(3, 1),
        loss=mean_as_total,
        # a step of one rank that is captured as one graph has no graph of autograd to read: the plan says so
        refused=dict.fromkeys([row for row in EVERYWHERE if row != ("local", "compiled")], "Mean.of"),
    ),
    "a loss that draws from an iterator": Trap(
        make=with_temperatures,
        loss=at_a_temperature,
        refused=dict.fromkeys([(name, "compiled") for name in ("local", "ddp", "fsdp")], "can't compile"),
    ),
    "foreign parameters": Trap(
        make=lambda: nn.Linear(3, 1),
        loss=of_foreign,
        refused=dict.fromkeys(EVERYWHERE, "no trainable parameter got a gradient"),
    ),
    # under fsdp: transforms/test_kept_tensors.py
    "parameters that are kept": Trap(make=keeping, loss=of_kept, strategies=("local", "ddp")),
    "inner lists": Trap(
        make=lambda: nn.Linear(3, 1),
        loss=of_marked,
        batch=marked,
        step=lambda loss: fa.accumulate(loss, 2),
        refused=dict.fromkeys(EVERYWHERE, "fa.data.Rows"),
    ),
    "metadata of rows": Trap(
        make=lambda: nn.Linear(3, 1),
        loss=by_metadata,
        batch=with_metadata,
        step=lambda loss: fa.accumulate(loss, 2),
    ),
    "a model that is compiled in its factory": Trap(make=compiled_parts, loss=squares),
}


def run_trap(name: str, strategy: str, optimizer: str, compiled: bool) -> dict[str, Any]:
    """Losses, parameters and buffers, as fnaccel makes them."""
    trap, world = TRAPS[name], current()
    step = trap.step(trap.loss)
    step = step if trap.precision is None else fa.with_precision(step, trap.precision)
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
        given = (trap.batch(number, world.rank) for number in range(STEPS))
        for batch in (
            fa.shard(DataLoader(Ring(trap.batch), batch_size=None), presplit=True) if trap.ring else given
        ):
            state, metrics = train_step(state, batch)
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
