"""Training loops of two ranks with four micro-batches: fnaccel, and DDP and FSDP2 by hand.

Each is a generator that does one update for each `next` and yields the global mean loss, unread. The loops by
hand clip, and all-reduce the mean loss for their log, as real scripts do; `log=False` leaves that out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from interleave import Samples, race_steps
from models import GPT, PEAK, gpt_of_its_own, our_loss, our_optimizer, peer_loss, rate, tokens
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import fnaccel as fa

GLOBAL_BATCH, MICRO = 32, 4


def ours(strategy: Any, scope: Any = None, backend: str = "inductor") -> Iterator[torch.Tensor]:
    """fnaccel; its logged loss is the global mean too. Compiled if there is a `scope`."""
    step = fa.clip_norm(fa.accumulate(our_loss, MICRO), 1.0)
    step = step if scope is None else fa.compile(step, scope, backend=backend)
    train_step = fa.train_step(step, model=fa.distribute(GPT, strategy), optimizer=our_optimizer())
    state = train_step.init(seed=0)
    shards = fa.shard(DataLoader(tokens(), batch_size=GLOBAL_BATCH))
    for state, metrics in fa.scan(train_step, state, shards, epochs=1_000_000):  # noqa: B007, B020
        yield metrics["loss"]


def _loop(model: Any, context: Callable[[bool], Any], *, fused: bool, log: bool) -> Iterator[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, fused=fused or None)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    data = tokens()
    ranks = dist.get_world_size()
    loader = DataLoader(data, GLOBAL_BATCH // ranks, sampler=DistributedSampler(data, shuffle=False))
    model.train()
    while True:
        for x, y in loader:
            total = torch.zeros(())
            for index, micro in enumerate(zip(x.chunk(MICRO), y.chunk(MICRO), strict=True)):
                with context(index == MICRO - 1):
                    loss = peer_loss(model, *micro) / MICRO
                    loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            if log:
                dist.all_reduce(total)
                total /= ranks
            yield total


def ddp_by_hand(
    *, fused: bool = True, log: bool = True, backend: str | None = None
) -> Iterator[torch.Tensor]:
    """DistributedDataParallel with `no_sync` on all micro-batches but the last. Compiled by a `backend`."""
    torch.manual_seed(0)
    inner = torch.compile(gpt_of_its_own()(), backend=backend) if backend else GPT()
    model = DistributedDataParallel(inner, gradient_as_bucket_view=True)
    return _loop(
        model, lambda last: contextlib.nullcontext() if last else model.no_sync(), fused=fused, log=log
    )


def fsdp_by_hand(
    *, fused: bool = True, log: bool = True, backend: str | None = None, reshard: bool = True
) -> Iterator[torch.Tensor]:
    """`fully_shard` on each block and the root; gradients are reduced on the last micro-batch.

    Blocks are compiled before they are sharded, so that the hooks stay outside of the graphs.
    """
    torch.manual_seed(0)
    model: Any = gpt_of_its_own()()
    for index, block in enumerate(model.blocks):
        if backend:
            model.blocks[index] = torch.compile(block, backend=backend)
        fully_shard(model.blocks[index], reshard_after_forward=reshard)
    fully_shard(model)

    def toggle(last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        return contextlib.nullcontext()

    return _loop(model, toggle, fused=fused, log=log)


STRATEGIES = {"DDP": (fa.ddp, ddp_by_hand), "FSDP2": (fa.fsdp, fsdp_by_hand)}


def measure(kind: str, blocks: int, calls: int) -> Samples:
    """Seconds per update on this rank, after a check that all losses agree. Runs on every rank."""
    strategy, make = STRATEGIES[kind]
    loops = {
        "fnaccel": ours(strategy()),
        f"{kind} by hand": make(),
        f"{kind} by hand, AdamW's default": make(fused=False),
    }
    unlogged = make(log=False)
    mean = partial(_averaged, unlogged)
    loops[f"{kind} by hand, no loss logged"] = _Switch(unlogged, mean)
    return race_steps(loops, check=4, blocks=blocks, calls=calls)


def measure_compiled(kind: str, blocks: int, calls: int, backend: str) -> Samples:
    """The same for compiled loops. That of fnaccel has scope "step"."""
    loops = compiled_ddp(backend) if kind == "DDP" else compiled_fsdp(backend, reshard=kind == "ZeRO-3")
    return race_steps(loops, check=4, blocks=blocks, calls=calls)


def compiled_ddp(backend: str) -> dict[str, Iterator[torch.Tensor]]:
    """Compiled loops that replicate, and the eager ones."""
    return {
        "fnaccel": ours(fa.ddp(), "step", backend),
        "DDP by hand, compiled": ddp_by_hand(backend=backend),
        "DDP by hand, eager": ddp_by_hand(),
        "fnaccel, scope loss": ours(fa.ddp(), "loss", backend),
        "fnaccel, eager": ours(fa.ddp()),
    }


def compiled_fsdp(backend: str, *, reshard: bool) -> dict[str, Iterator[torch.Tensor]]:
    """Compiled loops that shard, and the eager ones: ZeRO-3, or ZeRO-2 without `reshard`."""
    strategy = fa.fsdp(reshard_after_forward=reshard)
    return {
        "fnaccel": ours(strategy, "step", backend),
        "FSDP2 by hand, compiled blocks": fsdp_by_hand(backend=backend, reshard=reshard),
        "FSDP2 by hand, eager": fsdp_by_hand(reshard=reshard),
        "fnaccel, scope block": ours(strategy, "block", backend),
        "fnaccel, eager": ours(strategy),
    }


class _Switch:
    """A loop whose losses are averaged over ranks while they are checked, and not while it is timed."""

    def __init__(
        self, loop: Iterator[torch.Tensor], mean: Callable[[], torch.Tensor], check: int = 4
    ) -> None:
        self._loop, self._mean, self._left = loop, mean, check

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        if self._left:
            self._left -= 1
            return self._mean()
        return next(self._loop)


def _averaged(loop: Iterator[torch.Tensor]) -> torch.Tensor:
    loss = next(loop).clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()
