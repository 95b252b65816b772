"""The time from the start of a training loop to its first losses, in processes of their own.

    python benchmarks/first_step.py '{"contestant": "fnaccel", "layers": 2, "rows": 2, "steps": [1, 10]}'

What was compiled before is in the folder that TORCHINDUCTOR_CACHE_DIR names: empty, a start is cold.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import one_process
import torch
from models import gpt_of_its_own, tokens

import fnaccel as fa

SCOPES = {"fnaccel": "step", "fnaccel, scope loss": "loss", "fnaccel, scope block": "block"}
BY_HAND = "by hand, torch.compile(model), fused AdamW"
CONTESTANTS = (*SCOPES, BY_HAND)
EAGER, BACKGROUND = "fnaccel, eager", "fnaccel, background=True"


def loop_of(contestant: str, *, rows: int, backend: str = "inductor", **model: Any) -> Iterator[torch.Tensor]:
    """The training loop of a contestant, nothing compiled yet. `model` has the options of the GPT."""
    factory, data = gpt_of_its_own(**model), tokens()
    if contestant == EAGER:
        return one_process.ours(factory, data, batch=rows)
    if contestant == BACKGROUND:
        return one_process.ours(factory, data, batch=rows, scope="step", background=True)
    if contestant in SCOPES:
        return one_process.ours(factory, data, batch=rows, scope=SCOPES[contestant], backend=backend)
    return one_process.by_hand(
        lambda: torch.compile(factory(), backend=backend), data, fused=True, batch=rows
    )


def seconds_to(folder: Path, steps: Sequence[int] = (1,), **options: Any) -> list[float]:
    """Seconds to the losses of steps in a new process that keeps compiled code in `folder`; as for `loop_of`.

    Of BACKGROUND also those of the step in which it goes over.
    """
    printed = subprocess.run(
        [sys.executable, __file__, json.dumps({**options, "steps": steps})],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **cache_in(folder)},
    ).stdout
    return json.loads(printed.splitlines()[-1])["seconds"]


def cache_in(folder: Path) -> dict[str, str]:
    """The environment that keeps compiled code in `folder`."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}


class _Told(logging.Handler):
    """Whether the log has said that steps run compiled code from now on."""

    over = False

    def emit(self, record: logging.LogRecord) -> None:
        self.over = self.over or "compiled code runs" in record.msg


def main() -> None:
    """Measure one contestant in this process."""
    options = json.loads(sys.argv[1])
    steps, told = options.pop("steps"), _Told()
    torch.set_num_threads(1)
    with fa.start(device="cpu"):
        began, loop, seconds = time.perf_counter(), loop_of(**options), []
        for number in range(1, steps[-1] + 1):
            loss = next(loop)
            if number in steps:
                float(loss)
                seconds.append(time.perf_counter() - began)
        if options["contestant"] == BACKGROUND:
            logging.getLogger("fnaccel").addHandler(told)
            logging.getLogger("fnaccel").setLevel(logging.INFO)
            while not told.over:
                began = time.perf_counter()
                float(next(loop))
            seconds.append(time.perf_counter() - began)
        print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
