"""What a compiled step must reproduce: one model and loss for each feature; runs inside real ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel.world.world import current
from tests.parity.rows import whole
from tests.tiny_models import Block, Net, batch_of, loss_fn

STEPS = 4
ROWS = (7, 5)


class Rich(nn.Module):
    """Dropout, batch norm with its buffers, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 6, bias=False)  # before a norm its gradient would be rounding alone
        self.norm = nn.BatchNorm1d(6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.drop = nn.Dropout(0.25)
        self.out = nn.Linear(6, 3, bias=False)
        self.back = nn.Linear(6, 3, bias=False)
        self.back.weight = self.out.weight

    def forward(self, x):
        x = self.norm(self.inp(x))
        for block in self.blocks:
            x = self.drop(block(x))
        return (self.out(x) + self.back(x.cos())).sum(dim=1, keepdim=True)


class Spare(Net):
    """One layer that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


class Strided(nn.Module):
    """Parameters and gradients whose elements lie in memory in other orders, and gradients that are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(4, 3, 2))
        self.slanted = nn.Parameter(torch.randn(7, 3, 2).permute(1, 2, 0))
        self.first, self.second = nn.Parameter(torch.randn(3, 1)), nn.Parameter(torch.randn(3, 1))
        self.even = nn.Parameter(torch.randn(30, 20))
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        spread = torch.einsum("bj,ijk->bki", x, self.turned).sum((1, 2)) + (x @ self.slanted.sum(2)).sum(1)
        image = x[:, None, :, None].expand(-1, 1, 3, 3).to(memory_format=torch.channels_last)
        rest = (x @ (self.first + self.second))[:, 0] + self.even.sum() * 0.01
        return (spread + rest + self.conv(image).mean((1, 2, 3)))[:, None]


class Some(Net):
    """A layer that only a rank of many rows uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 1)

    def forward(self, x):
        return super().forward(x) + (self.spare(x) if len(x) > 6 else 0.0)


class Skipping(Net):
    """A block that only a rank of many rows uses."""

    def forward(self, x):
        blocks = self.blocks if len(x) > 6 else self.blocks[:1]
        x = self.inp(x)
        for block in blocks:
            x = block(x)
        return self.out(x)


class Replacing(Net):
    """A buffer in whose place the forward puts another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return super().forward(x - self.mean)


def aux_loss(model, batch):
    x, y = batch
    out = model(x)
    error = (out - y).square()
    aux = {
        "mae": fa.Mean((out - y).abs().sum(), weight=len(y)),
        "rows": fa.Sum(len(y)),
        "nested": {"out": fa.Concat(out[:, 0])},
        "bare": error.mean(),
    }
    return fa.Mean(error.sum(), weight=torch.as_tensor(len(y)), aux=aux)


def scalar_loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def half_gradients(named, own, info):
    info.record("calls", own)
    return {name: grad * 0.5 for name, grad in named.items()}, own + 1


HALVED = fa.Transform("half", fa.Phase.GRADS, apply=half_gradients, init=lambda params: 0)
POLICY = fa.transforms.Precision(compute="fp16", init_scale=2.0**20, interval=2)


def rows_of(batch):
    return len(batch[1])


SETUPS: dict[str, Any] = {
    "plain": lambda: (loss_fn, Net, {}),
    "ragged": lambda: (fa.clip_norm(fa.accumulate(loss_fn, 3), 0.3), Net, {}),
    "rich": lambda: (fa.clip_norm(fa.accumulate(loss_fn, 2), 0.5), Rich, {}),
    "scalar": lambda: (fa.clip_value(scalar_loss, 0.01), Net, {}),
    "aux": lambda: (fa.accumulate(aux_loss, 2), Net, {}),
    "weight": lambda: (fa.with_weight(fa.accumulate(loss_fn, 2), rows_of), Net, {}),
    "ema": lambda: (fa.with_ema(fa.skip_nonfinite(loss_fn), 0.5), Net, {}),
    "bf16": lambda: (fa.with_precision(fa.accumulate(loss_fn, 2), "bf16"), Net, {}),
    "fp16": lambda: (fa.with_ema(fa.clip_norm(fa.with_precision(loss_fn, POLICY), 0.5), 0.9), Net, {}),
    "fp16 weight": lambda: (fa.with_weight(fa.with_precision(loss_fn, POLICY), rows_of), Net, {}),
    "momentum": lambda: (loss_fn, Net, {"optimizer": fa.sgd(0.1, momentum=0.9, nesterov=True)}),
    "groups": lambda: (
        loss_fn,
        Net,
        {
            "optimizer": fa.adamw(
                fa.warmup_cosine(0.05, warmup=2, total=9), groups={"*bias": {"weight_decay": 0.0, "lr": 0.01}}
            )
        },
    ),
    "foreign": lambda: (fa.clip_norm(loss_fn, 0.3), Net, {"optimizer": fa.optim.from_torch(torch.optim.RMSprop, lr=0.01)}),
    "own": lambda: (fa.clip_norm(HALVED(fa.accumulate(loss_fn, 2)), 0.3), Net, {}),
    "frozen": lambda: (loss_fn, Net, {"frozen": "blocks.0.*"}),
    "models": lambda: (
        lambda models, batch: fa.Mean(
            (models["a"](batch[0]) * models["b"](batch[0]) - batch[1]).square().sum(), weight=len(batch[1])
        ),
        {"a": Net, "b": Net},
        {},
    ),
    "strided": lambda: (loss_fn, Strided, {"optimizer": fa.adamw(0.05)}),
    "strided clip": lambda: (fa.clip_norm(fa.with_ema(loss_fn, 0.5), 0.3), Strided, {}),
    "strided foreign": lambda: (
        fa.clip_value(loss_fn, 0.1), Strided, {"optimizer": fa.optim.from_torch(torch.optim.RMSprop, lr=0.01)},
    ),
    "replacing": lambda: (loss_fn, Replacing, {}),
    "each": lambda: (fa.accumulate(loss_fn, 3, sync="each"), Net, {}),
    "some": lambda: (loss_fn, Some, {}),
    "skipping": lambda: (loss_fn, Skipping, {}),
    "spare": lambda: (fa.accumulate(loss_fn, 2), Spare, {}),
}  # fmt: skip


def my_batch(call: int, kind: str) -> Any:
    """This rank's rows of one call; sizes change from call to call where that is the point."""
    world = current()
    sizes = ROWS[: world.size]
    start = sum(sizes[: world.rank])
    grown = call % 2 if kind == "ragged" else 0
    x, y = (part[start : start + sizes[world.rank] + grown] for part in batch_of(20, call))
    if kind in ("ema", "fp16") and call == 1:
        y = y * torch.inf
    return x, y


def run_kind(
    kind: str, strategy: str, scope: str | None, backend: str = "aot_eager", **more: Any
) -> dict[str, Any]:
    """Losses, metrics and all of the state after a few calls."""
    step, model, options = SETUPS[kind]()
    if scope is not None:
        step = fa.compile(step, scope, backend=backend)
    options = {"optimizer": fa.adamw(0.05), **options, **more}
    train_step = fa.train_step(step, model=fa.distribute(model, strategy), **options)
    state = train_step.init(seed=0)
    torch.manual_seed(11)
    seen: list[dict[str, Any]] = []
    for call in range(STEPS):
        state, metrics = train_step(state, my_batch(call, kind))
        seen.append({k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in metrics.items()})
    out = {
        "metrics": [{k: v for k, v in one.items() if k != "recompilations"} for one in seen],
        "params": fa.tree.map(whole, state.params),
        "opt": fa.tree.map(whole, state.opt),
        "buffers": fa.tree.map(whole, state.buffers),
        "ema": None if state.ema is None else fa.tree.map(whole, state.ema),
        "scale": None if state.scale is None else fa.tree.map(torch.clone, state.scale),
        "updates": float(state.updates),
        "transforms": state.transforms,
    }
    compilation = train_step.compilation
    plan = str(train_step.plan)
    train_step.close()
    return {"out": out, "compilation": compilation, "plan": plan}


def run_in_two_parts(root: str, strategy: str, first: str | None, second: str | None) -> dict[str, Any]:
    """Two calls in one scope, a checkpoint, and two calls in another scope, by another train step."""
    step, model, options = SETUPS["rich"]()
    state: Any = None
    for start, scope in ((0, first), (2, second)):
        scoped = step if scope is None else fa.compile(step, scope, backend="aot_eager")
        train_step = fa.train_step(
            scoped, model=fa.distribute(model, strategy), **{"optimizer": fa.adamw(0.05), **options}
        )
        state = fa.resume_or_init(root, train_step, seed=0)
        for call in range(start, start + 2):
            state, _ = train_step(state, my_batch(call, "rich"))
        if start == 0:
            fa.save(root, state)
            train_step.close()
    return {"params": fa.tree.map(whole, state.params), "opt": fa.tree.map(whole, state.opt)}
