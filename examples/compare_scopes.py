"""Time and memory of a loss function in each scope of `fa.compile`, or under each of some strategies.

    python examples/compare_scopes.py
    python examples/compare_scopes.py --ranks 2 --strategies local ddp fsdp "tensor(2)" --scopes eager

Each row is measured in processes of its own, all on the batch of `example_batch`. Copy the file, and import
your loss function, model and batch in the place of those of train_gpt.py. The losses of the first steps have
to equal those of the first row: with dropout they can't, since compiled code draws other masks.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from train_gpt import GPT, example_batch, loss_fn

import fnaccel as fa

WARM_UPS = 3
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scopes", nargs="+", default=["eager", "block", "loss", "step"])
    parser.add_argument("--strategies", nargs="+", default=["local"], help="local takes one rank")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--precision", default="fp32", choices=TOLERANCE)
    parser.add_argument("--steps", type=int, default=30, help="that are timed")
    parser.add_argument("--warm", action="store_true", help="use torch's compile cache of earlier runs")
    parser.add_argument("--row", nargs=2, metavar=("SCOPE", "STRATEGY"), help=argparse.SUPPRESS)
    return parser


def measure(args: argparse.Namespace) -> None:
    """One row, in the processes of the launcher. The first rank prints it as JSON."""
    scope, strategy = args.row
    with fa.start() as world:
        step = fa.with_precision(loss_fn, args.precision)
        step = step if scope == "eager" else fa.compile(step, scope)
        train_step = fa.train_step(step, model=fa.distribute(GPT, strategy), optimizer=fa.adamw(3e-4))
        state = train_step.init(seed=0)
        batch = next(iter(fa.shard([example_batch()]).on(train_step.mesh)))
        times, losses = [], []
        for _ in range(1 + WARM_UPS + args.steps):
            start = time.perf_counter()
            state, metrics = train_step(state, batch)
            losses.append(float(metrics["loss"]))  # waits for the device
            times.append(time.perf_counter() - start)
        if world.device.type == "cpu":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # of the whole process
        else:
            peak = torch.accelerator.max_memory_allocated() / 2**20
        row = {
            "first": times[0],
            "step": statistics.median(times[1 + WARM_UPS :]),
            "peak": max(fa.collectives.gather_objects(peak)),
            "losses": losses[: 1 + WARM_UPS],
        }
        world.print(json.dumps(row))


def run(args: argparse.Namespace, scope: str, strategy: str) -> dict | str:
    """A row, or the last line that its processes said in the place of one."""
    ranks = 1 if strategy == "local" else args.ranks
    options = ["--precision", args.precision, "--steps", str(args.steps), "--row", scope, strategy]
    command = [sys.executable, "-m", "fnaccel", "launch", "-n", str(ranks), str(Path(__file__)), *options]
    cold = {} if args.warm else {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **cold}, check=False)
    if ended.returncode:
        errors = [line for line in ended.stderr.splitlines() if "Error:" in line]
        return errors[0] if errors else f"exit code {ended.returncode}"
    return json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("{")))


def main() -> None:
    args = arguments().parse_args()
    if args.row:
        measure(args)
        return
    print(
        f"{'strategy':20s} {'scope':6s} {'first step s':>12s} {'ms/step':>8s} {'speed':>7s} {'peak MiB':>9s}"
    )
    first = None
    for strategy in args.strategies:
        for scope in args.scopes:
            row = run(args, scope, strategy)
            if isinstance(row, str):
                print(f"{strategy:20s} {scope:6s} {row}")
                continue
            first = first or row
            pairs = zip(row["losses"], first["losses"], strict=True)
            apart = max(abs(loss - usual) / max(abs(usual), 1e-6) for loss, usual in pairs)
            speed = first["step"] / row["step"]
            note = f"  losses differ by {apart:.1e}" if apart > TOLERANCE[args.precision] else ""
            if speed > 1 and row["first"] > first["first"] and not note:
                steps = (row["first"] - first["first"]) / (first["step"] - row["step"])
                note = f"  its first step is paid back after {steps:,.0f} steps"
            print(
                f"{strategy:20s} {scope:6s} {row['first']:12.2f} {1000 * row['step']:8.1f} {speed:6.2f}x "
                f"{row['peak']:9.0f}{note}"
            )


if __name__ == "__main__":
    main()
