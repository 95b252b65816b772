"""What gradients as values cost: DP-SGD beside Opacus, a second gradient and `fa.call` beside a plain step.

    OMP_NUM_THREADS=1 python benchmarks/gradients.py [--quick]

The rows beside Opacus need it (`pip install opacus`). Its optimizer clips as here, without noise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from environment import present
from interleave import Samples, agree, race, race_steps
from models import GPT, gpt_of_its_own, our_loss, peer_loss, tokens
from options import Options, begin
from report import Row, compare, publish
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import fnaccel as fa
from fnaccel.testing import RankPool

CLIP, RATE, RADIUS = 0.5, 0.1, 0.05
OPACUS = "Opacus"
PLAIN = "a plain step"
BY_HAND = "PyTorch by hand"
PERTURBED = {PLAIN: 2.2, BY_HAND: 1.1}
Make = Callable[[], nn.Module]


def mlp() -> nn.Module:
    """Three layers of width 64."""
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


class Small(GPT):
    """The small GPT, with positions looked up for each row: Opacus sees calls of modules only."""

    def __init__(self) -> None:
        super().__init__(width=32, layers=2, heads=2)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text) + self.position(torch.arange(text.shape[1]).expand(text.shape))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def row_loss(model: Any, batch: Any) -> fa.Mean:
    """The loss by rows: a row of tokens is one row. Attention in its math form, which vmap has a rule for."""
    x, y = batch
    with sdpa_kernel(SDPBackend.MATH):
        total = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum")
    return fa.Mean(total, weight=len(x))


def ours(make: Make, batch: Any, step: Any, strategy: str = "local") -> Iterator[torch.Tensor]:
    """A loop of fnaccel over one batch."""
    train_step = fa.train_step(step, model=fa.distribute(make, strategy), optimizer=fa.sgd(RATE))
    state = train_step.init(seed=0)
    while True:
        state, metrics = train_step(state, batch)
        yield metrics["loss"]


def opacus(make: Make, batch: Any) -> Iterator[torch.Tensor]:
    """The same by Opacus: gradients of rows by hooks, clipped by its optimizer."""
    from opacus import GradSampleModule  # pyright: ignore[reportMissingImports]
    from opacus.optimizers import DPOptimizer  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    model = GradSampleModule(make(), loss_reduction="sum")
    x, y = batch
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE), noise_multiplier=0.0, max_grad_norm=CLIP,
        expected_batch_size=len(x),
    )  # fmt: skip
    while True:
        optimizer.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):
            total = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum")
        total.backward()
        optimizer.step()
        yield total.detach() / len(x)


def row_rows(options: Options) -> list[Row]:
    """Clipped rows, beside Opacus."""
    table: list[Row] = []
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)
    backend = options.pick("inductor", "inductor", "eager")
    sizes: dict[str, tuple[Make, Any]] = {"MLP, 32 rows": (mlp, rows)}
    if options.level != "smoke":
        sizes["small GPT, 8 rows of 64 tokens"] = Small, tokens(8)[:]
    step = fa.per_example(row_loss, clip=CLIP)
    compiled = fa.compile(step, backend=backend)
    for size, (make, batch) in sizes.items():
        for what, mine in ((f"DP-SGD, {size}", step), (f"DP-SGD compiled, {size}", compiled)):
            loops = {
                "fnaccel": ours(make, batch, mine),
                OPACUS: opacus(make, batch),
                PLAIN: ours(make, batch, row_loss),
            }
            samples = race_clipped(present(loops), options)
            goals = {OPACUS: 0.5 if "compiled" in what else 1.5}
            table += compare(what, samples, goals, unit="ms")
    return table


def race_clipped(loops: dict[str, Iterator[torch.Tensor]], options: Options) -> Any:
    """Clipped loops must agree. The plain one is another training, and only a measure."""
    agree({name: [float(next(loop)) for _ in range(4)] for name, loop in loops.items() if name != PLAIN})
    calls = {name: loop.__next__ for name, loop in loops.items()}
    return race(calls, blocks=options.pick(21, 5, 1), calls=options.pick(10, 5, 1))


def ascend(grads: dict[str, Any], info: fa.extend.Info) -> dict[str, Any]:
    """The move of sharpness-aware minimisation."""
    return fa.tree.scale(grads, RADIUS / (fa.tree.norm(grads) + 1e-12))


def sharpness_aware_by_hand(batch: Any, strategy: str) -> Iterator[torch.Tensor]:
    """The same in plain PyTorch, by list kernels."""
    torch.manual_seed(0)
    model: Any = gpt_of_its_own()()
    if strategy == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=RATE, fused=True)
    while True:
        loss = peer_loss(model, *batch)
        loss.backward()
        with torch.no_grad():
            grads = [p.grad for p in params if p.grad is not None]
            moves = torch._foreach_mul(grads, RADIUS / nn.utils.get_total_norm(grads))
            torch._foreach_add_(params, moves)
        optimizer.zero_grad()
        peer_loss(model, *batch).backward()
        with torch.no_grad():
            torch._foreach_sub_(params, moves)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def twice(strategy: str, blocks: int) -> Samples:
    """Seconds of a step with a second gradient, and of a plain one. Runs on every rank."""
    data = tokens(8)[:]
    loops = {
        "fnaccel": ours(gpt_of_its_own(), data, fa.perturb(our_loss, ascend), strategy),
        PLAIN: ours(gpt_of_its_own(), data, our_loss, strategy),
    }
    if strategy != "fsdp":
        loops[BY_HAND] = sharpness_aware_by_hand(data, strategy)
        agree({name: [float(next(loops[name])) for _ in range(4)] for name in ("fnaccel", BY_HAND)})
    return race({name: loop.__next__ for name, loop in loops.items()}, blocks=blocks, calls=5)


def through_call(model: Any, batch: Any) -> fa.Mean:
    """The loss by parameters as an argument."""
    x, y = batch
    out = fa.call(model, fa.params(model), x)
    total = nn.functional.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="sum")
    return fa.Mean(total, weight=y.numel())


def step_rows(options: Options) -> list[Row]:
    """A second gradient, and parameters as an argument, beside a plain step."""
    data, blocks = tokens(8)[:], options.pick(21, 5, 1)
    call = {
        "fnaccel": ours(gpt_of_its_own(), data, through_call),
        PLAIN: ours(gpt_of_its_own(), data, our_loss),
    }
    table = compare(
        "a loss through fa.call, small GPT", race_steps(call, check=4, blocks=blocks, calls=5), unit="ms"
    )
    samples = twice("local", blocks)
    return table + compare("a step with fa.perturb, small GPT", samples, PERTURBED, unit="ms")


def rank_rows(pool: RankPool, options: Options) -> list[Row]:
    """A second gradient on two ranks, as the first one measures it."""
    table: list[Row] = []
    for strategy in ("ddp", "fsdp"):
        samples = pool.run(twice, strategy, options.pick(21, 5, 1))[0]
        what = f"a step with fa.perturb, small GPT, {strategy} on 2 ranks"
        table += compare(what, samples, PERTURBED, unit="ms")
    return table


def main() -> None:
    """Run all rows."""
    options = begin("gradients", __doc__ or "", (), (OPACUS,))
    # forked before anything here starts a thread
    with RankPool(2, timeout=900) as pool:
        with fa.start(device="cpu"):
            table = [*row_rows(options), *step_rows(options)]
        publish(options, [*table, *rank_rows(pool, options)])


if __name__ == "__main__":
    main()
