"""The time from the start of a training loop to its first loss, in processes of their own.

    python benchmarks/first_step.py CONTESTANT LAYERS ROWS    # prints seconds, graphs and cache hits

What was compiled before lies in the folder that TORCHINDUCTOR_CACHE_DIR names: empty, a start is cold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import one_process
import torch
from models import gpt_of_its_own, tokens

import fnaccel as fa

SCOPES = {"fnaccel": "step", "fnaccel, scope loss": "loss", "fnaccel, scope block": "block"}
BY_HAND = "by hand, torch.compile(model), fused AdamW"
CONTESTANTS = (*SCOPES, BY_HAND)


def loop_of(contestant: str, layers: int, rows: int) -> Iterator[torch.Tensor]:
    """The training loop of a contestant, nothing compiled yet."""
    factory, data = gpt_of_its_own(layers=layers), tokens()
    if contestant in SCOPES:
        return one_process.ours(factory, data, batch=rows, scope=SCOPES[contestant])
    return one_process.by_hand(lambda: torch.compile(factory()), data, fused=True, batch=rows)


def seconds_to_first(contestant: str, layers: int, rows: int, folder: Path) -> float:
    """Seconds to the first loss in a new process that keeps what it compiles in `folder`."""
    command = [sys.executable, __file__, contestant, str(layers), str(rows)]
    said = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, **cache_in(folder)}
    ).stdout
    return float(json.loads(said.splitlines()[-1])["seconds"])


def cache_in(folder: Path) -> dict[str, str]:
    """The environment that keeps compiled code in `folder`."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Measure one, in this process."""
    contestant, layers, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    with fa.start(device="cpu"):
        began = time.perf_counter()
        loop = loop_of(contestant, layers, rows)
        float(next(loop))
        print(json.dumps({"seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
