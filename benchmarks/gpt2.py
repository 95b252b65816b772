"""What a train step of GPT-2 (124M parameters) costs on one GPU: time, beside the card's peak, and memory.

    OMP_NUM_THREADS=1 python benchmarks/gpt2.py [--quick]

It needs a CUDA device. Contestants run in one process, in turns; they must reach the same losses first.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import one_process
import torch
import torch.nn.functional as F
from environment import present
from interleave import Samples, agree, race
from models import our_loss, our_optimizer
from options import Options, begin
from report import Row, compare, publish
from torch.utils.data import TensorDataset

import fnaccel as fa
from fnaccel.seeing.throughput import PEAKS
from fnaccel.transforms.compilation import own_code

PEER = "Accelerate + torch.compile(model)"
GPT2 = "GPT-2 124M, bf16, {rows} x {length} tokens"
HAND = "torch.compile(model) by hand, fused AdamW"
OURS = {
    "fnaccel, captured, CUDA graphs": {"scope": "step", "mode": "reduce-overhead"},
    "fnaccel": {"scope": "step"},
    "fnaccel, scope block": {"scope": "block"},
    "fnaccel, eager": None,
}


def gpt2(small: bool = False) -> torch.nn.Module:
    """GPT-2 as its paper's smallest, without dropout; two narrow layers of it if `small`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256} if small else {"vocab_size": 50304}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False))

    class Logits(torch.nn.Module):
        """Logits alone, as the other models here give them."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            return self.inner(text).logits

    Logits.forward = own_code(Logits.forward)
    return Logits()


def gpt2_by_hand(make: Callable[[], torch.nn.Module], data: TensorDataset, batch: int, backend: str) -> Any:
    """nanoGPT's loop: a compiled model under autocast, fused AdamW, batches that lie on the device."""
    model, optimizer, scheduler = one_process._parts(make, fused=True)
    device = data.tensors[0].device
    model.to(device).train()
    compiled = torch.compile(model, backend=backend)
    while True:
        for rows in torch.arange(len(data)).split(batch):
            x, y = (column[rows[0] : rows[-1] + 1] for column in data.tensors)
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(compiled(x).flatten(0, -2), y.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            yield loss.detach()


def gpt2_rows(options: Options) -> list[Row]:
    """A model of a size that people train: the time of a step, its memory, and the time to the first loss."""
    smoke = options.level == "smoke"
    device = "cpu" if smoke else "cuda"
    backend = "eager" if smoke else "inductor"  # no C++ for a test that everything runs
    rows, length = (2, 32) if smoke else (16, 1024)
    drawn = torch.randint(256 if smoke else 50257, (4 * rows, length + 1), device=device)
    data = TensorDataset(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())

    def make() -> torch.nn.Module:
        return gpt2(small=smoke)

    def ours(compiling: dict[str, Any] | None) -> Iterator[torch.Tensor]:
        loss = fa.with_precision(fa.clip_norm(our_loss, 1.0), "bf16")
        if compiling is not None:
            mode = None if smoke else compiling.get("mode")
            loss = fa.compile(loss, compiling["scope"], mode=mode, backend=backend)
        train_step = fa.train_step(loss, model=fa.distribute(make, fa.local()), optimizer=our_optimizer())
        state = train_step.init(seed=one_process.SEED)
        while True:
            for at in range(0, len(data), rows):
                state, metrics = train_step(state, tuple(column[at : at + rows] for column in data.tensors))
                yield metrics["loss"]

    def accelerate() -> Iterator[torch.Tensor]:
        on_host = TensorDataset(*(column.cpu() for column in data.tensors))
        return one_process.with_accelerate(
            make,
            on_host,
            fused=True,
            batch=rows,
            cpu=smoke,
            dynamo_backend=backend,
            mixed_precision="bf16",
        )

    peak: Samples = {}
    first: Samples = {}
    losses: dict[str, list[float]] = {}
    with fa.start(device=device):
        makers = {HAND: lambda: gpt2_by_hand(make, data, rows, backend), f"{PEER}, fused AdamW": accelerate}
        makers |= {name: lambda compiling=compiling: ours(compiling) for name, compiling in OURS.items()}
        loops = present({name: maker() for name, maker in makers.items()})
        torch.compile(torch.sin, backend=backend)(torch.ones(2, device=device))  # imports are not the first's
        for name, loop in loops.items():
            losses[name], peak[name], first[name] = _first_steps(loop, device)
            print(f"{name}: losses {losses[name]}, peak {peak[name][0]:.0f} MiB", flush=True)
        agree(losses, tolerance=1e-2)  # of bf16
        calls, blocks = 2 if smoke else 10, options.pick(9, 5, 1)
        samples = race({name: loop.__next__ for name, loop in loops.items()}, blocks=blocks, calls=calls)
    what = GPT2.format(rows=rows, length=length)
    print(f"fnaccel: {rows * length / statistics.median(samples['fnaccel']):,.0f} tokens a second")
    samples |= {limit: [least] * blocks for limit, least in _at_peak(make(), rows, length).items()}
    return [
        *compare(f"step, {what}", samples, {HAND: 0.97}, "ms"),
        *compare(f"peak memory, {what}", peak, {HAND: 1.0}, "MiB"),
        *compare(f"first loss, {what}", first, unit="s"),
    ]


def _first_steps(loop: Iterator[torch.Tensor], device: str) -> tuple[list[float], list[float], list[float]]:
    """The first five losses, the MiB that these steps take at most, and the seconds to the first."""
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = 0 if device == "cpu" else torch.cuda.memory_allocated()
    began = time.perf_counter()
    with torch.compiler.config.patch(force_disable_caches=True):  # or contestants find what others compiled
        found = [float(next(loop))]
    seconds = time.perf_counter() - began
    found += [float(next(loop)) for _ in range(4)]
    peak = 2**20 if device == "cpu" else torch.cuda.max_memory_allocated() - before
    return found, [peak / 2**20], [seconds]


def _at_peak(model: torch.nn.Module, rows: int, length: int) -> dict[str, float]:
    """The seconds of a step if the card did nothing but multiply, by the name of that limit.

    A token takes 6 operations for each parameter, and 12 for each layer, width and position (attention), as
    in the appendix of PaLM, arXiv:2204.02311. Positions are only added.
    """
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    config = model.inner.config
    count = sum(p.numel() for p in model.parameters()) - config.n_positions * config.n_embd
    flops = (6 * count + 12 * config.n_layer * config.n_embd * length) * rows * length
    found = [tera for name, tera in PEAKS.items() if name in card]
    return {f"the card's peak, {tera:.0f} TFLOP/s": flops / tera / 1e12 for tera in found[:1]}


def main() -> None:
    """Run the race."""
    options = begin("gpt2", __doc__, (), ("Accelerate",))
    if options.level != "smoke" and not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpt2.py needs a CUDA device")
    publish(options, gpt2_rows(options))


if __name__ == "__main__":
    main()
