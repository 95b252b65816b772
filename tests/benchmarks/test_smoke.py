"""Each benchmark runs once, with small sizes: its rows are there, and all ratios are numbers."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import environment
import pytest
import tables

from tests.docs.names import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

HAND, FUSED = "PyTorch by hand", "PyTorch by hand, fused AdamW"
PLAIN, KERNEL = "foreach by hand", "foreach by hand, as a kernel of fnaccel"
COMPILED = "by hand, torch.compile(model), fused AdamW"
COMPILED_BY_HAND, PEER = "torch.compile(model) by hand, fused AdamW", "Accelerate + torch.compile(model)"
SCOPES = ("fnaccel, scope loss", "fnaccel, scope block", "fnaccel, eager")
CALLS = ("Accelerate", "Lightning Fabric", "torch.distributed, a call per leaf")
CUT = ("parallelize_module by hand", "parallelize_module by hand, AdamW's default", "fnaccel, ddp")
BARE = ("bare fa.scan",)
STAGES = "Schedule1F1B by hand"
APART = ("local_sgd(2, every=16)", "diloco(2, every=16)")
LEARNING = (*APART, "diloco(2, every=16, outer='sgd(0.7, momentum=0.5, nesterov=True)')")
ROWS = {
    "step_overhead": {
        "eager step, tiny MLP, with loader, clip, schedule": (HAND, FUSED, "Accelerate", "Lightning Fabric"),
        "same, a dataset of the user's own class": (HAND, FUSED),
        "same, no loader (one batch at hand)": (HAND, FUSED),
        "step of 4 parameter tensors": (HAND, FUSED),
        "step of 16 parameter tensors": (HAND, FUSED),
        "slope: each further parameter tensor": (HAND, FUSED),
        "one batch of 32 through shard, TensorDataset": ("plain DataLoader",),
        "one batch of 32 through shard, own class": ("plain DataLoader",),
        "2 ranks, accumulate 4, eager, small GPT": ("DDP by hand", "DDP by hand, AdamW's default", "DDP by hand, no loss logged"),
        "2 ranks FSDP2, accumulate 4, small GPT": ("FSDP2 by hand", "FSDP2 by hand, AdamW's default", "FSDP2 by hand, no loss logged"),
    },
    "starting": {
        "import fnaccel, with the names of a training script": ("import torch", "import accelerate"),
        "launch an empty script, 2 ranks": ("torchrun", "torchrun --standalone"),
        "1 layers, background=True, nothing cached: loss of step 1": ("fnaccel, eager",),
        "1 layers, background=True, nothing cached: the step that goes over": ("a warm start",),
    },
    "optimizer_parts": {
        **{f"step with LAMB, {rows} x 64 tokens, small GPT": (KERNEL, PLAIN) for rows in (2, 8)},
        **{f"step with AdamW from parts, {rows} x 64 tokens, small GPT": ("fa.adamw",) for rows in (2, 8)},
        "update by LAMB, 41 tensors, 187,000 values": (PLAIN,),
        "update by AdamW's rule, 41 tensors, 187,000 values": ("the fused kernel",),
    },
    "head": {
        f"loss of 64 rows and its backward, vocabulary 100, width 8: {what}": ("F.cross_entropy", "F.linear_cross_entropy, 128 rows")
        for what in ("time", "memory")
    },
    "gradients": {
        "DP-SGD, MLP, 32 rows": ("Opacus", "a plain step"),
        "DP-SGD compiled, MLP, 32 rows": ("Opacus", "a plain step"),
        "a loss through fa.call, small GPT": ("a plain step",),
        "a step with fa.perturb, small GPT": ("a plain step", "PyTorch by hand"),
        "a step with fa.perturb, small GPT, ddp on 2 ranks": ("a plain step", "PyTorch by hand"),
        "a step with fa.perturb, small GPT, fsdp on 2 ranks": ("a plain step",),
    },
    "pure": {
        "one of 2 updates in one graph, MLP": ("a loop of train steps, eager", "pure updates, eager"),
        **{f"gradient through 4 updates of Adam, 2 at a time run again: {what}": ("everything kept",) for what in ("peak", "time")},
    },
    "compiled": {
        "2 ranks, accumulate 4, compiled, small GPT": ("DDP by hand, compiled", "DDP by hand, eager", "fnaccel, scope loss", "fnaccel, eager"),
        "2 ranks FSDP2 (ZeRO-3), accumulate 4, compiled, small GPT": ("FSDP2 by hand, compiled blocks", "FSDP2 by hand, eager", "fnaccel, scope block", "fnaccel, eager"),
        "compiled step, small GPT, 1 process, 1 x 64 tokens": (
            PEER, f"{PEER}, fused AdamW", "torch.compile(model) by hand", COMPILED_BY_HAND, *SCOPES,
        ),
        "2 layers: compiled step, 2 x 64 tokens": (*SCOPES, COMPILED),
        "3 layers: compiled step, 2 x 64 tokens": (*SCOPES, COMPILED),
        "3 layers: first loss, cold": (COMPILED,),
        "slope: a compiled step, each further layer": (*SCOPES, COMPILED),
    },
    "collectives": {
        **{f"{call}: 16 leaves of {size}": CALLS for call in ("gather", "reduce") for size in ("[8, 4], 2 KiB", "[64, 256], 1 MiB")},
        **{f"pad: 16 leaves of {size}": (CALLS[0], CALLS[2]) for size in ("[8, 4], 2 KiB", "[64, 256], 1 MiB")},
        **{f"{call}: {leaves} leaves of [8, 4]": CALLS for call in ("gather", "reduce") for leaves in (1, 4)},
        **{f"pad: {leaves} leaves of [8, 4]": (CALLS[0], CALLS[2]) for leaves in (1, 4)},
        **{f"{call}, slope: each further leaf": CALLS for call in ("gather", "reduce")},
        "pad, slope: each further leaf": (CALLS[0], CALLS[2]),
        **{f"dispatch on {ranks} ranks: bytes received per rank and batch of 65,536": ("Accelerate",) for ranks in (2, 4)},
    },
    "checkpoint": {
        **{f"save, {size} MiB": ("write + fsync", "Accelerate", "DCP") for size in (12, 24)},
        **{f"save_async, {size} MiB: the loop is blocked": ("sync save", "DCP async_save") for size in (12, 24)},
        **{f"restore, {size} MiB": ("load_file + copy", "Accelerate", "DCP") for size in (12, 24)},
        "save, slope: each further MiB": ("write + fsync", "Accelerate", "DCP"),
        "restore, slope: each further MiB": ("load_file + copy", "Accelerate", "DCP"),
        **{f"{kind} on 2 ranks (fsdp), 24 MiB: extra memory": ("the rank's shard",) for kind in ("save", "restore", "save_async")},
    },
    "axes": {
        "tensor(2), 1 layers, 8 x 64 tokens": CUT,
        "tensor(2), 2 layers, 8 x 64 tokens": CUT,
        "slope: tensor(2), each further layer": CUT,
        "context(2), 1 layers, 2 x 512 tokens": ("fnaccel, ring", "fnaccel, heads", "fnaccel, ddp on whole rows"),
    },
    "seeing": dict.fromkeys(
        (
            *(f"JSONL, TensorBoard, progress, throughput; log_every={every}" for every in (50, 1)), "throughput alone",
            "progress alone", "JSONL, log_every=1", "memory", "seven marks of a step",
        ),
        BARE,
    ),
    "pipeline": {
        "pipeline(2), 1f1b: step, 2 layers, 8 micro-batches of 4 x 64 tokens": (STAGES,),
        "pipeline(2), gpipe: step, 2 layers, 8 micro-batches of 4 x 64 tokens": ("ScheduleGPipe by hand",),
        "pipeline(2), 1f1b: bytes between the stages in a step": (STAGES,),
        **{
            f"pipeline({ranks}), 1f1b: time in which ranks wait, {count} micro-batches": ("(p - 1) / (m + p - 1)", STAGES)
            for ranks in (2, 4) for count in (4, 8)
        },
        **{
            f"pipeline({ranks}), zero_bubble: time in which ranks wait, {count} micro-batches": (
                "fnaccel, 1f1b", "(p - 1) / (6 m + p - 1)"
            )
            for ranks, count in ((2, 4), (2, 8), (4, 8))
        },
        "big.pipeline on 2 ranks: a call, 2 layers, 8 chunks of 1 x 64 tokens": ("prepare_pippy", "ScheduleGPipe by hand"),
        **{f"pipeline(4), 1f1b: activations that rank {rank} keeps, 8 micro-batches": ("fnaccel, gpipe",) for rank in range(4)},
    },
    "replicas": {
        **{f"{name}: training loss, the last 32 of 32 steps": ("ddp",) for name in (*LEARNING, "no average at all")},
        **{f"{name}: bytes that a rank sends in a step": ("ddp",) for name in (*LEARNING, "no average at all")},
        **{f"{name}: held-out loss after 32 steps": ("ddp",) for name in LEARNING},
        **{f"{name}: step over 10 Mbit/s": ("ddp",) for name in APART},
    },
    "offload": {f"forward, {what} page cache, 2 layers, 2 MB on the disk": ("Accelerate",) for what in ("1 token, warm", "64 tokens, warm", "1 token, cold")},
    "load": {f"{what} 3 MB of safetensors to the CPU, bfloat16": ("Accelerate",) for what in ("load", "load and first forward,", "peak memory,")},
    "gpu": {
        "compiled step, small GPT, one GPU (CUDA graphs)": (
            PEER, f"{PEER}, fused AdamW", f"{PEER}, fused AdamW, CUDA graphs", "fnaccel, eager",
        ),
    },
    "gpt2": {
        f"{what}, GPT-2 124M, bf16, 2 x 32 tokens": (
            COMPILED_BY_HAND, f"{PEER}, fused AdamW", "fnaccel, captured, CUDA graphs", "fnaccel, scope block", "fnaccel, eager",
        )
        for what in ("step", "peak memory", "first loss")
    },
    "jax_step": {
        "captured step, GPT of width 32, 8 x 64 tokens": ("jax.jit and optax",),
        "captured step, GPT of width 32: first loss, cold": ("jax.jit and optax",),
    },
}  # fmt: skip


def run(script, into):
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), "--smoke", "--into", str(into)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


MARKS = {"jax_step": pytest.mark.environment(".venv-jax/.jax"), "replicas": pytest.mark.netns}


@pytest.mark.parametrize("script", [pytest.param(name, marks=MARKS.get(name, ())) for name in ROWS])
def test_a_benchmark_has_its_rows(script, tmp_path):
    printed = run(script, tmp_path / f"{script}.json")
    rows = tables.read(tmp_path)[script].rows
    expected = {
        (what, peer)
        for what, peers in ROWS[script].items()
        for peer in environment.present(dict.fromkeys(peers))
    }
    assert {(row["what"], row["against"]) for row in rows} == expected
    for row in rows:
        if "not_run" not in row:
            assert math.isfinite(row["ratio"]), row
            assert row["ours"] > 0 or "slope" in row["what"] or "memory" in row["what"], row
    absent = json.loads((tmp_path / f"{script}.json").read_text())["absent"]
    assert all(
        not environment.is_installed(peer) and f"left out: {', '.join(absent)}" in printed for peer in absent
    )


def test_every_benchmark_is_here():
    scripts = [
        path.stem for path in (ROOT / "benchmarks").glob("*.py") if "publish(options" in path.read_text()
    ]
    assert sorted(ROWS) == sorted(script for script in scripts if script != "report")
