"""A pure update (`fa.pure`): k updates in one graph, gradients through training, and their memory.

    OMP_NUM_THREADS=1 python benchmarks/pure.py [--only updates,memory,hypergradient] [--quick]

`updates` are AdamW's of an MLP (64-64-64-10) on 32 rows: 32 of them in one graph, against the loop of train
steps with the fused kernel, and JAX's `lax.scan` where `.venv-jax` has it. `memory` is the gradient by the
learning rate of a loss after 24 updates of Adam on 128 rows: everything kept, or four updates at a time run
again. `hypergradient` is the gradient of a loss after five updates of Adam, by the initial parameters, beside
TorchOpt's MetaAdam (`pip install --no-deps torchopt graphviz`).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from environment import ROOT, present
from interleave import Samples, race
from options import Options, begin
from report import Row, compare, publish
from torch import nn

import fnaccel as fa

PARTS = ("updates", "memory", "hypergradient")
PYTHON = ROOT / ".venv-jax" / "bin" / "python"
RATE, ROWS, SEED = 1e-3, 32, 0
LOOP, EAGER, SCAN = "a loop of train steps, eager", "pure updates, eager", "jax.lax.scan and optax"
KEPT = "everything kept"
TORCHOPT = "TorchOpt"


def mlp() -> nn.Module:
    """Three layers, 9,000 values."""
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def loss_fn(model: Any, batch: Any) -> fa.Mean:
    """Cross entropy of classes."""
    x, y = batch
    return fa.Mean(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))


def batches(count: int, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random rows, and a class that depends on them."""
    generator = torch.Generator().manual_seed(SEED)
    xs = [torch.randn(rows, 64, generator=generator) for _ in range(count)]
    return [(x, x[:, :10].argmax(1)) for x in xs]


def program(optimizer: Any) -> fa.TrainStep:
    """A train step of the MLP."""
    return fa.train_step(loss_fn, model=fa.distribute(mlp, fa.local()), optimizer=optimizer)


def updates(options: Options) -> list[Row]:
    """Seconds of one of k updates."""
    count = options.pick(32, 32, 2)
    data, rate = batches(count, ROWS), torch.tensor(RATE)
    train_step = program(fa.adamw(RATE))
    update, held = fa.pure(train_step), [train_step.init(SEED)]
    first = update.values(held[0])

    def run(values: Any, data: Any, rate: torch.Tensor) -> Any:
        for batch in data:
            values, _ = update(values, batch, lr=rate)
        return values

    backend = options.pick("inductor", "inductor", "eager")
    graph = torch.compile(run, fullgraph=True, backend=backend)
    box = [graph(first, data, rate)]
    for batch in data:
        held[0], _ = train_step(held[0], batch)
    worst = max(
        float((value.detach() - box[0]["params"][name]).abs().max()) for name, value in held[0].params.items()
    )
    if worst > 1e-4:
        raise SystemExit(f"the graph and the loop differ by {worst:g}")

    def in_one_graph() -> None:
        box[0] = graph(box[0], data, rate)

    def loop() -> None:
        for batch in data:
            held[0], _ = train_step(held[0], batch)

    contestants = {"fnaccel": in_one_graph, LOOP: loop, EAGER: lambda: run(first, data, rate)}
    blocks, calls = options.pick(15, 5, 1), options.pick(5, 5, 1)
    samples: Samples = {
        name: [seconds / count for seconds in taken]
        for name, taken in race(contestants, blocks=blocks, calls=calls).items()
    }
    if options.level != "smoke" and PYTHON.exists():
        samples[SCAN] = scan_samples(count, blocks, calls)
    return compare(f"one of {count} updates in one graph, MLP", samples, {LOOP: 0.4})


def scan_samples(count: int, blocks: int, calls: int) -> list[float]:
    """Seconds of one update by `lax.scan`, in a process of JAX of its own."""
    script = Path(__file__).with_name("jax_scan.py")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONPATH", None)
    settings = json.dumps({"count": count, "blocks": blocks, "calls": calls, "rows": ROWS, "rate": RATE})
    done = subprocess.run(
        [str(PYTHON), str(script), settings], capture_output=True, text=True, check=True, env=environment
    )
    return json.loads(done.stdout)


def memory(options: Options) -> list[Row]:
    """Peak bytes and seconds of a gradient through 24 updates."""
    count, length = options.pick((24, 4), (24, 4), (4, 2))
    data = batches(count + 1, 128)
    update = fa.pure(program(fa.adam(1e-2)))
    first = update.init(SEED)

    def segment(values: Any, data: Any, rate: torch.Tensor) -> Any:
        for batch in data:
            values, _ = update(values, batch, lr=rate)
        return values

    def gradient(run: Any) -> torch.Tensor:
        rate = torch.tensor(1e-2, requires_grad=True)
        values = first
        for start in range(0, count, length):
            values = run(values, data[start : start + length], rate)
        update.loss(values, data[-1]).backward()
        assert rate.grad is not None
        return rate.grad

    runs = {"fnaccel": fa.recomputed(segment), KEPT: segment}
    grads = {name: gradient(run) for name, run in runs.items()}
    if not torch.allclose(*grads.values(), rtol=1e-3):
        raise SystemExit(f"gradients differ: {grads}")
    peaks: dict[str, list[float]] = {}
    for name, run in runs.items():
        with fa.estimate.LiveStorages() as storages:
            gradient(run)
        peaks[name] = [storages.peak / 2**20]
    times = race(
        {n: lambda run=run: gradient(run) for n, run in runs.items()}, blocks=options.pick(9, 3, 1), calls=1
    )
    what = f"gradient through {count} updates of Adam, {length} at a time run again"
    return [
        *compare(f"{what}: peak", peaks, {KEPT: 0.4}, "MiB"),
        *compare(f"{what}: time", times, unit="ms"),
    ]


def hypergradient(options: Options) -> list[Row]:
    """Seconds of a gradient through five updates of Adam."""
    *data, last = batches(6, ROWS)
    update = fa.pure(program(fa.adam(1e-2)))
    first = update.init(SEED)
    start = {name: value.detach().clone() for name, value in first["params"].items()}

    def final(params: Any) -> torch.Tensor:
        values = {**first, "params": params}
        for batch in data:
            values, _ = update(values, batch)
        return update.loss(values, last)

    def backward() -> list[torch.Tensor]:
        params = {name: value.clone().requires_grad_() for name, value in start.items()}
        return list(torch.autograd.grad(final(params), [*params.values()]))

    def torchopt() -> list[torch.Tensor]:
        from torchopt import MetaAdam  # pyright: ignore[reportMissingImports]

        model = mlp()
        model.load_state_dict(start)
        leaves, optimizer = [*model.parameters()], MetaAdam(model, lr=1e-2)
        for x, y in data:
            optimizer.step(F.cross_entropy(model(x), y))
        return list(torch.autograd.grad(F.cross_entropy(model(last[0]), last[1]), leaves))

    graph = torch.compile(
        torch.func.grad(final), fullgraph=True, backend=options.pick("inductor", "inductor", "eager")
    )
    table: list[Row] = []
    for how, mine, goal in (
        ("eager", backward, 1.25),
        ("compiled", lambda: [*graph(start).values()], 0.3),
    ):
        calls = present({"fnaccel": mine, TORCHOPT: torchopt})
        found = [torch.cat([grad.flatten() for grad in call()]) for call in calls.values()]
        worst = max(float((each - found[0]).norm() / each.norm()) for each in found)
        if worst > 1e-3:
            raise SystemExit(f"{how} and TorchOpt differ by {worst:g}")
        samples = race(calls, blocks=options.pick(15, 5, 1), calls=options.pick(5, 5, 1))
        table += compare(f"gradient through 5 updates of Adam, {how}", samples, {TORCHOPT: goal}, unit="ms")
    return table


def main() -> None:
    """Run the parts asked for, on one core."""
    options = begin("pure", str(__doc__), PARTS, (TORCHOPT,))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    table: list[Row] = []
    with fa.start(device="cpu"):
        if "updates" in options.parts:
            table += updates(options)
        if "memory" in options.parts:
            table += memory(options)
        if "hypergradient" in options.parts:
            table += hypergradient(options)
    publish(options, table)


if __name__ == "__main__":
    main()
