"""What a compiled train step costs in fnaccel, beside torch.compile by hand and by Accelerate.

    OMP_NUM_THREADS=1 python benchmarks/compiled.py [--only step,layers,ddp,fsdp,gpu] [--quick]

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
from interleave import race_steps, slope
from models import gpt_of_its_own, tokens
from options import begin
from report import NotRun, Row, compare, publish

import fnaccel as fa
from fnaccel.testing import RankPool

PARTS = ("step", "layers", "ddp", "fsdp", "gpu")
ROWS = (1, 2, 8)
LAYERS = (2, 4, 8)
SWEPT_ROWS = 2
PEER = "Accelerate + torch.compile(model)"
ON_GPU = "compiled step, small GPT, one GPU (CUDA graphs)"
Loops = dict[str, Iterator[torch.Tensor]]


def step_loops(rows: int) -> Loops:
    """Every contestant of one process, each with code of its own."""
    data = tokens()

    def ours(scope: str | None) -> Iterator[torch.Tensor]:
        return one_process.ours(gpt_of_its_own(), data, batch=rows, scope=scope)

    def by_hand(*, fused: bool) -> Iterator[torch.Tensor]:
        factory = gpt_of_its_own()
        return one_process.by_hand(lambda: torch.compile(factory()), data, fused=fused, batch=rows)

    def accelerate(*, fused: bool) -> Iterator[torch.Tensor]:
        return one_process.with_accelerate(
            gpt_of_its_own(), data, fused=fused, batch=rows, dynamo_backend="inductor"
        )

    return {
        "fnaccel": ours("step"),
        PEER: accelerate(fused=False),
        f"{PEER}, fused AdamW": accelerate(fused=True),
        "torch.compile(model) by hand": by_hand(fused=False),
        "torch.compile(model) by hand, fused AdamW": by_hand(fused=True),
        "fnaccel, scope loss": ours("loss"),
        "fnaccel, scope block": ours("block"),
        "fnaccel, eager": ours(None),
    }


def step_rows(blocks: int) -> list[Row]:
    """(a) One process at three batch sizes, each held to the goal."""
    made: list[Row] = []
    for rows in ROWS:
        found = race_steps(step_loops(rows), check=5, blocks=blocks, calls=max(3, 24 // rows))
        made += compare(f"compiled step, small GPT, 1 process, {rows} x 64 tokens", found, {PEER: 0.75}, "ms")
    return made


def layers_rows(blocks: int) -> list[Row]:
    """(b) How a step and the time to the first loss grow with layers."""
    made: list[Row] = []
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as root:
        folders = {name: Path(root) / str(number) for number, name in enumerate(first_step.CONTESTANTS)}
        for layers in LAYERS:
            steps = Path(root) / f"steps{layers}"
            if layers in (LAYERS[0], LAYERS[-1]):
                for kind in ("cold", "warm"):
                    found = {
                        name: first_step.seconds_to_first(name, layers, SWEPT_ROWS, folder / str(layers))
                        for name, folder in folders.items()
                    }
                    made += compare(f"{layers} layers: first loss, {kind}", found, unit="s")
                for folder in folders.values():
                    # what these processes compiled need not be compiled here again; never over
                    # what this process has loaded: each number of layers has a folder
                    shutil.copytree(folder / str(layers), steps, dirs_exist_ok=True)
            with mock.patch.dict(os.environ, first_step.cache_in(steps)):
                loops = {
                    name: first_step.loop_of(name, layers, SWEPT_ROWS) for name in first_step.CONTESTANTS
                }
                loops["fnaccel, eager"] = one_process.ours(
                    gpt_of_its_own(layers=layers), tokens(), batch=SWEPT_ROWS
                )
                found = race_steps(loops, check=5, blocks=blocks, calls=5)
            made += compare(f"{layers} layers: compiled step, {SWEPT_ROWS} x 64 tokens", found, unit="ms")
            for name, seconds in found.items():
                taken.setdefault(name, []).append(seconds)
    slopes = {name: slope(list(LAYERS), seconds) for name, seconds in taken.items()}
    return made + compare("slope: a compiled step, each further layer", slopes, unit="ms")


def rank_rows(pool: RankPool, kind: str, what: str, blocks: int) -> list[Row]:
    """(c), (d) Two ranks that accumulate over four micro-batches."""
    return compare(what, pool.run(two_ranks.measure_compiled, kind, blocks, 4)[0], unit="ms")


def gpu_rows(blocks: int, device: str = "cuda") -> list[Row] | list[NotRun]:
    """(e) CUDA graphs on one GPU; without one the row says so."""
    if device == "cuda" and not torch.cuda.is_available():
        return [NotRun(ON_GPU, PEER, 0.5, "no GPU")]
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # its CPU of the rows before would stay
    data, graphs = tokens(), "reduce-overhead"

    def accelerate(*, mode: str | None = None, fused: bool = False) -> Iterator[torch.Tensor]:
        return one_process.with_accelerate(
            gpt_of_its_own(), data, fused=fused, batch=8, mode=mode, cpu=device == "cpu",
            dynamo_backend="inductor",
        )  # fmt: skip

    with fa.start(device=device):
        loops: Loops = {
            "fnaccel": one_process.ours(gpt_of_its_own(), data, batch=8, scope="step", mode=graphs),
            PEER: accelerate(),
            f"{PEER}, fused AdamW": accelerate(fused=True),
            f"{PEER}, fused AdamW, CUDA graphs": accelerate(fused=True, mode=graphs),
            "fnaccel, eager": one_process.ours(gpt_of_its_own(), data, batch=8),
        }
        found = race_steps(loops, check=5, blocks=blocks, calls=20)
    return compare(ON_GPU, found, {PEER: 0.5}, "ms")


def main() -> None:
    """Run the parts asked for."""
    options = begin(__doc__, PARTS)
    blocks = 5 if options.quick else 31
    made: list[Row | NotRun] = []
    # forked before anything here starts a thread or a peer's singleton
    with RankPool(2, timeout=900) as pool:
        if "ddp" in options.parts:
            made += rank_rows(pool, "DDP", "2 ranks, accumulate 4, compiled, small GPT", blocks // 2)
        if "fsdp" in options.parts:
            for kind in ("ZeRO-3", "ZeRO-2"):
                what = f"2 ranks FSDP2 ({kind}), accumulate 4, compiled, small GPT"
                made += rank_rows(pool, kind, what, blocks // 2)
    with fa.start(device="cpu"):
        if "step" in options.parts:
            made += step_rows(blocks)
        if "layers" in options.parts:
            made += layers_rows(blocks // 2)
    if "gpu" in options.parts:
        made += gpu_rows(blocks)
    publish("quick" if options.quick else "compiled", made, merge=not options.whole)


if __name__ == "__main__":
    main()
