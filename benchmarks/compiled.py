"""What a compiled train step costs in fnaccel, beside torch.compile by hand and by Accelerate.

    OMP_NUM_THREADS=1 python benchmarks/compiled.py [--only ddp,fsdp,step,layers] [--quick]

Contestants run in the same processes, in turns, on the same model, data and seed; they must reach the same
losses first. The time to the first loss is taken in processes of their own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import first_step
import one_process
import torch
import two_ranks
from environment import present
from interleave import Samples, race_steps, slopes
from models import gpt_of_its_own, tokens
from options import Options, begin
from report import Row, compare, publish

import fnaccel as fa
from fnaccel.testing import RankPool

PARTS = ("ddp", "fsdp", "step", "layers")
ROWS = (1, 2, 8)
LAYERS = (2, 4, 8)
SWEPT_ROWS = 2
PEER = "Accelerate + torch.compile(model)"
Loops = dict[str, Iterator[torch.Tensor]]


def backend_of(options: Options) -> str:
    """A test that everything runs need not wait for C++ to be compiled."""
    return options.pick("inductor", "inductor", "eager")


def step_loops(rows: int, backend: str) -> Loops:
    """Every contestant of one process, each with code of its own."""
    data = tokens()

    def ours(scope: str | None) -> Iterator[torch.Tensor]:
        return one_process.ours(gpt_of_its_own(), data, batch=rows, scope=scope, backend=backend)

    def by_hand(*, fused: bool) -> Iterator[torch.Tensor]:
        factory = gpt_of_its_own()
        return one_process.by_hand(
            lambda: torch.compile(factory(), backend=backend), data, fused=fused, batch=rows
        )

    def accelerate(*, fused: bool) -> Iterator[torch.Tensor]:
        return one_process.with_accelerate(
            gpt_of_its_own(), data, fused=fused, batch=rows, dynamo_backend=backend
        )

    loops = {
        "fnaccel": ours("step"),
        PEER: accelerate(fused=False),
        f"{PEER}, fused AdamW": accelerate(fused=True),
        "torch.compile(model) by hand": by_hand(fused=False),
        "torch.compile(model) by hand, fused AdamW": by_hand(fused=True),
        "fnaccel, scope loss": ours("loss"),
        "fnaccel, scope block": ours("block"),
        "fnaccel, eager": ours(None),
    }
    return present(loops)


def step_rows(options: Options) -> list[Row]:
    """One process at three batch sizes, each with the same goal."""
    table: list[Row] = []
    for rows in options.pick(ROWS, ROWS[-1:], ROWS[:1]):
        calls = options.pick(max(3, 24 // rows), 3, 1)
        loops = step_loops(rows, backend_of(options))
        samples = race_steps(loops, check=5, blocks=options.pick(31, 5, 1), calls=calls)
        what = f"compiled step, small GPT, 1 process, {rows} x 64 tokens"
        table += compare(what, samples, {PEER: 0.75}, "ms")
    return table


def layers_rows(options: Options) -> list[Row]:
    """How a step and the time to the first loss grow with layers."""
    table: list[Row] = []
    measured: list[Samples] = []
    layers_swept = options.pick(LAYERS, LAYERS[::2], (2, 3))
    backend = backend_of(options)
    with tempfile.TemporaryDirectory() as root:
        for layers in layers_swept:
            model = {"rows": SWEPT_ROWS, "layers": layers, "backend": backend}
            folder = Path(root) / str(layers)
            folder.mkdir()
            if layers == layers_swept[-1] or (layers == layers_swept[0] and options.level == "full"):
                table += first_rows(options, folder, **model)
            # a folder for each number of layers: code that this process has loaded is never replaced
            steps = Path(root) / f"steps{layers}"
            for name in folder.iterdir():
                # what the processes above compiled need not be compiled again
                shutil.copytree(name / "0", steps, dirs_exist_ok=True)
            with mock.patch.dict(os.environ, first_step.cache_in(steps)):
                loops = {name: first_step.loop_of(name, **model) for name in first_step.CONTESTANTS}
                loops["fnaccel, eager"] = one_process.ours(
                    gpt_of_its_own(layers=layers), tokens(), batch=SWEPT_ROWS
                )
                blocks, calls = options.pick(15, 3, 1), options.pick(5, 5, 1)
                measured.append(race_steps(loops, check=5, blocks=blocks, calls=calls))
            what = f"{layers} layers: compiled step, {SWEPT_ROWS} x 64 tokens"
            table += compare(what, measured[-1], unit="ms")
    return table + compare(
        "slope: a compiled step, each further layer", slopes(layers_swept, measured), unit="ms"
    )


def first_rows(options: Options, root: Path, *, rows: int, layers: int, backend: str) -> list[Row]:
    """The time to the first loss, cold with an empty folder each time, and warm with a filled one."""
    names = options.pick(first_step.CONTESTANTS, first_step.CONTESTANTS, ("fnaccel", first_step.BY_HAND))
    kinds = options.pick(("cold", "warm"), ("cold", "warm"), ("cold",))
    taken: dict[str, Samples] = {kind: {name: [] for name in names} for kind in kinds}
    for number in range(options.pick(2, 1, 1)):
        for kind in kinds:
            for place, name in enumerate(names):
                folder = root / str(place) / str(number if kind == "cold" else 0)
                seconds = first_step.seconds_to(
                    folder, contestant=name, rows=rows, layers=layers, backend=backend
                )
                taken[kind][name] += seconds
    return [
        row
        for kind, samples in taken.items()
        for row in compare(f"{layers} layers: first loss, {kind}", samples, unit="s")
    ]


def rank_rows(pool: RankPool, options: Options, kind: str, what: str) -> list[Row]:
    """Two ranks that accumulate over four micro-batches."""
    blocks, calls = options.pick(15, 2, 1), options.pick(4, 4, 1)
    samples = pool.run(two_ranks.measure_compiled, kind, blocks, calls, backend_of(options))[0]
    return compare(what, samples, unit="ms")


def main() -> None:
    """Run the parts asked for."""
    options = begin("compiled", __doc__, PARTS, ("Accelerate",))
    table: list[Row] = []
    # forked before anything here starts a thread or a peer's singleton
    with RankPool(2, timeout=900) as pool:
        if "ddp" in options.parts:
            table += rank_rows(pool, options, "DDP", "2 ranks, accumulate 4, compiled, small GPT")
        if "fsdp" in options.parts:
            for kind in options.pick(("ZeRO-3", "ZeRO-2"), ("ZeRO-3", "ZeRO-2"), ("ZeRO-3",)):
                what = f"2 ranks FSDP2 ({kind}), accumulate 4, compiled, small GPT"
                table += rank_rows(pool, options, kind, what)
    with fa.start(device="cpu"):
        if "step" in options.parts:
            table += step_rows(options)
        if "layers" in options.parts:
            table += layers_rows(options)
    publish(options, table)


if __name__ == "__main__":
    main()
