"""The time from the start of a training loop to its first loss, in processes of their own.

    python benchmarks/first_step.py '{"contestant": "fnaccel", "layers": 2, "rows": 2}'

What was compiled before is in the folder that TORCHINDUCTOR_CACHE_DIR names: empty, a start is cold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import one_process
import torch
from models import gpt_of_its_own, tokens

import fnaccel as fa

SCOPES = {"fnaccel": "step", "fnaccel, scope loss": "loss", "fnaccel, scope block": "block"}
BY_HAND = "by hand, torch.compile(model), fused AdamW"
CONTESTANTS = (*SCOPES, BY_HAND)


def loop_of(contestant: str, *, rows: int, backend: str = "inductor", **model: Any) -> Iterator[torch.Tensor]:
    """The training loop of a contestant, nothing compiled yet. `model` has the options of the GPT."""
    factory, data = gpt_of_its_own(**model), tokens()
    if contestant in SCOPES:
        return one_process.ours(factory, data, batch=rows, scope=SCOPES[contestant], backend=backend)
    return one_process.by_hand(
        lambda: torch.compile(factory(), backend=backend), data, fused=True, batch=rows
    )


def seconds_to_first(folder: Path, **options: Any) -> float:
    """Seconds to the first loss in a new process that keeps compiled code in `folder`; as for `loop_of`."""
    printed = subprocess.run(
        [sys.executable, __file__, json.dumps(options)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **cache_in(folder)},
    ).stdout
    return float(json.loads(printed.splitlines()[-1])["seconds"])


def cache_in(folder: Path) -> dict[str, str]:
    """The environment that keeps compiled code in `folder`."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Measure one contestant in this process."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with fa.start(device="cpu"):
        began = time.perf_counter()
        float(next(loop_of(**options)))
        print(json.dumps({"seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
