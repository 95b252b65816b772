"""Training loops of one process: fnaccel, PyTorch by hand, Accelerate, Lightning Fabric.

Each is a generator that does one update for each `next` and yields its loss, on the device and unread.
Data come in order (no shuffle), so that all see the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from models import PEAK, our_loss, our_optimizer, peer_loss, rate
from torch import nn
from torch.utils.data import DataLoader

import fnaccel as fa

BATCH = 32
SEED = 0
Factory = Callable[[], nn.Module]


def _parts(factory: Factory, fused: bool = False) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(SEED)
    model = factory()
    # what fused=None means on CPUs: a Python loop over parameters
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, fused=fused or None)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def ours(
    factory: Factory, data: Any, *, batch: int = BATCH, scope: Any = None, **compiling: Any
) -> Iterator[torch.Tensor]:
    """fnaccel, with its loader; compiled where there is a `scope`."""
    step = our_loss if scope is None else fa.compile(our_loss, scope, **compiling)
    train_step = _train_step(factory, step)
    state = train_step.init(seed=SEED)
    shards = fa.shard(DataLoader(data, batch_size=batch))
    for state, metrics in fa.scan(train_step, state, shards, epochs=1_000_000):  # noqa: B007, B020
        yield metrics["loss"]


def ours_resident(factory: Factory, batch: Any) -> Iterator[torch.Tensor]:
    """fnaccel, one batch again and again."""
    train_step = _train_step(factory)
    state = train_step.init(seed=SEED)
    while True:
        state, metrics = train_step(state, batch)
        yield metrics["loss"]


def _train_step(factory: Factory, loss: Any = our_loss) -> fa.TrainStep:
    step = fa.clip_norm(loss, 1.0)
    return fa.train_step(step, model=fa.distribute(factory, fa.local()), optimizer=our_optimizer())


def by_hand(
    factory: Factory, data: Any, *, fused: bool = False, batch: int = BATCH
) -> Iterator[torch.Tensor]:
    """The loop of PyTorch's tutorials, without a host read."""
    loader = DataLoader(data, batch_size=batch)
    step = _step_by_hand(factory, fused=fused)
    while True:
        for x, y in loader:
            yield step(x, y)


def by_hand_resident(factory: Factory, batch: Any, *, fused: bool = False) -> Iterator[torch.Tensor]:
    """The same, one batch again and again."""
    step = _step_by_hand(factory, fused=fused)
    while True:
        yield step(*batch)


def _step_by_hand(factory: Factory, *, fused: bool) -> Callable[..., torch.Tensor]:
    model, optimizer, scheduler = _parts(factory, fused)
    model.train()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = peer_loss(model, x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def with_accelerate(
    factory: Factory,
    data: Any,
    *,
    fused: bool = False,
    batch: int = BATCH,
    mode: str | None = None,
    **options: Any,
) -> Iterator[torch.Tensor]:
    """Hugging Face Accelerate, as its documentation writes the loop.

    `options` are the Accelerator's; `mode` is that of torch.compile, of which its shared state holds one.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(**{"cpu": True, **options})
    if "dynamo_backend" in options:
        accelerator.state.dynamo_plugin.mode = mode or "default"
    model, optimizer, scheduler = _parts(factory, fused)
    loader = DataLoader(data, batch_size=batch)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    while True:
        for x, y in loader:
            loss = peer_loss(model, x, y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield loss.detach()


def with_fabric(factory: Factory, data: Any) -> Iterator[torch.Tensor]:
    """Lightning Fabric, likewise."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer, scheduler = _parts(factory)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=BATCH))
    model.train()
    while True:
        for x, y in loader:
            loss = peer_loss(model, x, y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield loss.detach()
