"""The captured step of fnaccel beside `jax.jit`: the same GPT, weights and rows, at two widths.

    make bench-jax        # makes an environment with jax beside this one, then runs this script
    OMP_NUM_THREADS=1 python benchmarks/jax_step.py [--only first,step] [--quick]

torch and jax have an environment each, so each contestant is a process of its own. Both run on the same core
and take turns in short blocks: while one runs, the other waits for a line. Their first losses are equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import first_step
import torch
from environment import ROOT
from interleave import Samples, agree, timed_block, turns
from models import GPT, PEAK, TOTAL, WARMUP, gpt_of_its_own, tokens
from one_process import SEED, ours
from options import Options, begin
from report import Row, compare, publish
from tables import JAX, ON_JAX

import fnaccel as fa

PARTS = ("first", "step")
PYTHON = ROOT / ".venv-jax" / "bin" / "python"
WIDTHS, HEADS, ROWS, CHECK = (32, 128), 4, 8, 20


class Worker:
    """A process of `jax_gpt.py`."""

    def __init__(self, file: Path, **variables: str) -> None:
        settings = {"heads": HEADS, "rows": ROWS, "peak": PEAK, "warmup": WARMUP, "total": TOTAL}
        script = Path(__file__).with_name("jax_gpt.py")
        command = [str(PYTHON), str(script), str(file), json.dumps(settings)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.versions: dict[str, str] = self._read()

    def ask(self, **question: Any) -> Any:
        """The answer to one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of jax ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def write(width: int, file: Path) -> None:
    """The weights that every contestant begins with, and the rows."""
    import numpy as np

    torch.manual_seed(SEED)
    weights = {name: value.numpy() for name, value in GPT(width, heads=HEADS).state_dict().items()}
    x, y = (column.numpy() for column in tokens().tensors)
    np.savez(file, x=x, y=y, **weights)


def step_samples(options: Options, width: int, worker: Worker) -> Samples:
    """Seconds of each round of each contestant, after a check that their losses agree."""
    backend = options.pick("inductor", "inductor", "eager")
    with fa.start(device="cpu"):
        loop = ours(
            gpt_of_its_own(width=width, heads=HEADS), tokens(), batch=ROWS, scope="step", backend=backend
        )
        agree({"fnaccel": [float(next(loop)) for _ in range(CHECK)], "JAX": worker.ask(losses=CHECK)})
        calls = options.pick(400 // width, 400 // width, 1)
        blocks = {
            "fnaccel": lambda: timed_block(loop.__next__, calls),
            JAX: lambda: worker.ask(block=calls),
        }
        samples: Samples = {name: [] for name in blocks}
        for counts, name in turns(list(blocks), options.pick(41, 7, 1)):
            seconds = blocks[name]()
            if counts:
                samples[name].append(seconds)
    return samples


def first_rows(options: Options, width: int, root: Path, file: Path) -> list[Row]:
    """The time to the first loss in new processes, cold with empty caches, and warm with filled ones."""
    backend = options.pick("inductor", "inductor", "eager")
    kinds = options.pick(("cold", "warm"), ("cold", "warm"), ("cold",))
    taken: dict[str, Samples] = {kind: {"fnaccel": [], JAX: []} for kind in kinds}
    for number in range(options.pick(2, 1, 1)):
        for kind in kinds:
            folder = cache_of(root, width, number if kind == "cold" else 0)
            taken[kind]["fnaccel"] += first_step.seconds_to(
                folder / "torch", contestant="fnaccel", rows=ROWS, width=width, heads=HEADS, backend=backend
            )
            worker = Worker(
                file,
                JAX_COMPILATION_CACHE_DIR=str(folder / "jax"),
                JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
                JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
            )
            taken[kind][JAX].append(worker.ask(first=True))
            worker.close()
    return [
        row
        for kind, samples in taken.items()
        for row in compare(f"{ON_JAX} {width}: first loss, {kind}", samples, unit="s")
    ]


def cache_of(root: Path, width: int, number: int = 0) -> Path:
    """The folder of compiled code of one cold start."""
    return root / f"{width}-{number}"


def main() -> None:
    """Run the parts asked for, on one core."""
    options = begin("jax_step", str(__doc__), PARTS)
    if not PYTHON.exists():
        print("not installed, left out: JAX (make bench-jax makes its environment)")
        return
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    table: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for width in options.pick(WIDTHS, WIDTHS, WIDTHS[:1]):
            file = root / f"{width}.npz"
            write(width, file)
            if "first" in options.parts:
                table += first_rows(options, width, root, file)
            worker = Worker(file)
            if "step" in options.parts:
                # what the first cold start compiled need not be compiled again
                with mock.patch.dict(os.environ, first_step.cache_in(cache_of(root, width) / "torch")):
                    samples = step_samples(options, width, worker)
                table += compare(f"{ON_JAX} {width}, {ROWS} x 64 tokens", samples, unit="ms")
            worker.close()
    publish(options, table, worker.versions)


if __name__ == "__main__":
    main()
