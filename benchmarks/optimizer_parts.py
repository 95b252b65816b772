"""What an optimizer from parts costs: LAMB by parts and by hand, AdamW by its kernel and by its rule.

    OMP_NUM_THREADS=1 python benchmarks/optimizer_parts.py [--only step,update] [--quick]

`step` is a whole step of the small GPT. `update` is the optimizer alone, over the parameters of the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
import torch
from interleave import race
from models import GPT, our_loss, peer_loss, tokens
from options import begin
from report import Row, compare, publish

import fnaccel as fa
from fnaccel.models.parameter import Leaf
from fnaccel.optim import fused
from fnaccel.optim.description import group_leaves

PARTS = ("step", "update")
RATE, DECAY, SEED = 1e-3, 1e-2, 0
PLAIN, KERNEL, FUSED = "foreach by hand", "foreach by hand, as a kernel of fnaccel", "the fused kernel"


def lamb() -> Any:
    """LAMB from parts."""
    o = fa.optim
    parts = (o.clip_norm(1.0), o.scale_by_adam(eps=1e-6), o.add_decayed_weights(DECAY), o.trust_ratio())
    return o.chain(*parts, lr=RATE)


class LambByHand:
    """LAMB by list kernels, as one would write it for one process."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params, self.number = params, 0
        self.means, self.squares = ([torch.zeros_like(p) for p in params] for _ in range(2))

    @torch.no_grad()
    def step(self, grads: list[torch.Tensor]) -> None:
        """One update. Writes to the gradients."""
        self.number += 1
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, (1.0 / norm).clamp(max=1.0))
        torch._foreach_lerp_(self.means, grads, 0.1)
        torch._foreach_mul_(self.squares, 0.999)
        torch._foreach_addcmul_(self.squares, grads, grads, 0.001)
        roots = torch._foreach_div(self.squares, 1 - 0.999**self.number)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, 1e-6)
        moves = torch._foreach_div(self.means, 1 - 0.9**self.number)
        torch._foreach_div_(moves, roots)
        torch._foreach_add_(moves, self.params, alpha=DECAY)
        weight, move = (torch.stack(torch._foreach_norm(each)) for each in (self.params, moves))
        ratio = torch.where((weight == 0) | (move == 0), 1.0, weight / move)
        torch._foreach_mul_(moves, list(ratio.unbind()))
        torch._foreach_add_(self.params, moves, alpha=-RATE)


def step_by_parts(optimizer: Any, batch: Any, step: Any = our_loss) -> Callable[[], torch.Tensor]:
    """A step of fnaccel, one batch again and again."""
    model = fa.distribute(GPT, fa.local())
    train_step = fa.train_step(step, model=model, optimizer=optimizer)
    held = [train_step.init(seed=SEED)]

    def call() -> torch.Tensor:
        held[0], metrics = train_step(held[0], batch)
        return metrics["loss"]

    return call


@attrs.frozen
class KernelByHand:
    """LAMB by hand as a kernel of fnaccel, so that all but the update is the same."""

    def bind(self, groups: Any) -> Any:
        """Slots that no checkpoint has."""
        return BoundByHand([member.leaf.shard for group in groups for member in group.members])


class BoundByHand:
    """The update by hand, with the factor that gradients lack."""

    reads_host = False

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.slots: dict[str, Any] = {}
        self.update = LambByHand(params)

    def apply(self, grads: Any, rates: Any, multiplier: Any, skip: Any, updates: Any) -> None:
        """One update."""
        if multiplier is not None:
            torch._foreach_mul_(grads, multiplier)
        self.update.step(grads)


def step_by_hand(batch: Any) -> Callable[[], torch.Tensor]:
    """A loop in PyTorch with the same update."""
    torch.manual_seed(SEED)
    model = GPT().train()
    params = list(model.parameters())
    optimizer = LambByHand(params)  # pyright: ignore[reportArgumentType]

    def call() -> torch.Tensor:
        loss = peer_loss(model, *batch)
        loss.backward()
        optimizer.step([p.grad for p in params])  # pyright: ignore[reportArgumentType]
        for param in params:
            param.grad = None
        return loss.detach()

    return call


def same(contestants: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Raise SystemExit unless all reach the same losses."""
    losses = {name: torch.stack([call() for _ in range(6)]) for name, call in contestants.items()}
    wanted = next(iter(losses.values()))
    for name, found in losses.items():
        if not torch.allclose(found, wanted, rtol=1e-4):
            raise SystemExit(f"{name} reaches {found.tolist()}, and not {wanted.tolist()}")


def steps(blocks: int, calls: int, rows: int) -> list[Row]:
    """Whole steps, eager."""
    batch = tokens(rows)[:]
    by_hand = fa.extend.Optimizer(name="lamb", lr=RATE, options=(), kernel=KernelByHand())
    lambs = {"fnaccel": step_by_parts(lamb(), batch), KERNEL: step_by_parts(by_hand, batch)}
    lambs[PLAIN] = step_by_hand(batch)
    same(lambs)
    adams = {"fnaccel": step_by_parts(fa.optim.chain(*fa.adamw(RATE).parts, lr=RATE), batch)}
    adams["fa.adamw"] = step_by_parts(fa.adamw(RATE), batch)
    same(adams)
    what = f"{rows} x 64 tokens, small GPT"
    lamb_times, adam_times = (race(each, blocks=blocks, calls=calls) for each in (lambs, adams))
    goals = {KERNEL: 1.05, PLAIN: 1.05}
    return [
        *compare(f"step with LAMB, {what}", lamb_times, goals, "ms"),
        *compare(f"step with AdamW from parts, {what}", adam_times, {"fa.adamw": 1.02}, "ms"),
    ]


def _update(optimizer: Any) -> Callable[[], None]:
    torch.manual_seed(SEED)
    params = list(GPT().parameters())
    leaves = [Leaf(str(i), p.detach(), p.detach(), p.detach()) for i, p in enumerate(params)]
    bound = optimizer.kernel.bind(group_leaves(optimizer, leaves))
    source = [torch.randn_like(p) for p in params]
    grads, number = [torch.empty_like(p) for p in params], torch.ones(())

    def call() -> None:
        torch._foreach_copy_(grads, source)
        bound.apply(grads, [RATE], None, None, number)

    return call


def _update_by_hand() -> Callable[[], None]:
    torch.manual_seed(SEED)
    params = [p.detach() for p in GPT().parameters()]
    optimizer, source = LambByHand(params), [torch.randn_like(p) for p in params]
    grads = [torch.empty_like(p) for p in params]

    def call() -> None:
        torch._foreach_copy_(grads, source)
        optimizer.step(grads)

    return call


def updates(blocks: int, calls: int) -> list[Row]:
    """The optimizer alone: 41 tensors of 187,000 values."""
    adamw = fa.adamw(RATE)
    with mock.patch.object(fused, "fused_of", return_value=None):
        by_rule = _update(fa.optim.chain(*adamw.parts, lr=RATE))
    what = "41 tensors, 187,000 values"
    lambs = race({"fnaccel": _update(lamb()), PLAIN: _update_by_hand()}, blocks=blocks, calls=calls)
    adams = race({"fnaccel": by_rule, FUSED: _update(adamw)}, blocks=blocks, calls=calls)
    return [
        *compare(f"update by LAMB, {what}", lambs, unit="ms"),
        *compare(f"update by AdamW's rule, {what}", adams, unit="ms"),
    ]


def main() -> None:
    """Run the parts asked for."""
    options = begin("optimizer_parts", str(__doc__), PARTS)
    blocks, calls = options.pick(31, 9, 2), options.pick(10, 10, 1)
    table: list[Row] = []
    with fa.start():
        if "step" in options.parts:
            table += steps(blocks, calls, 2)
            table += steps(blocks, max(1, calls // 3), 8)
        if "update" in options.parts:
            table += updates(blocks, calls)
    publish(options, table)


if __name__ == "__main__":
    main()
