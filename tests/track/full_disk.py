"""A training run whose disk is full after step 2, in a process of its own: `python full_disk.py NAME FOLDER OPTIONS`.

`FOLDER/logs` has to be a small disk. Beside the tracker NAME a `JsonlTracker` writes to `FOLDER/expected.jsonl`, on
another disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 300
ROOT = Path(__file__).parents[2]


def start(name, folder, size, **options):
    """Run the training with a disk of `size` at `folder/logs`: the errors of each tracker, and what was printed."""
    namespace = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount", "--net"]
    (folder / "logs").mkdir()
    tried = [*namespace, "mount", "-t", "tmpfs", "none", str(folder / "logs")]
    if not shutil.which("unshare") or subprocess.run(tried, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small disk in a namespace of its own")
    mount = f'mount -t tmpfs -o size={size} none "{folder}/logs" && exec "$@"'
    done = subprocess.run(
        [*namespace, "sh", "-c", mount, "sh",
         sys.executable, __file__, name, str(folder), json.dumps(options)],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    [result] = [line for line in done.stdout.splitlines() if line.startswith("STEP ")]
    _, step, _, failures = result.split(" ", 3)
    assert int(step) == STEPS
    lines = (folder / "expected.jsonl").read_text().splitlines()
    assert len(lines) == 2 + STEPS, "the tracker on the other disk goes on"
    return json.loads(failures), done.stderr


def fill(folder):
    """Write to a disk until it is full."""
    with (folder / "filling").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(512)):
            pass


def main(name, folder, options):
    import torch
    from torch import nn

    import fnaccel as fa

    def loss_fn(model, batch):
        return fa.Mean(model(batch).square().sum(), weight=len(batch))

    trackers = [{"name": name, **options}, fa.track.JsonlTracker(folder / "expected.jsonl")]
    with fa.start(device="cpu"), fa.tracked(fa.Tracking(*trackers, directory=folder)) as run:
        model = fa.distribute(lambda: nn.Linear(2, 1), fa.local())
        train_step = fa.train_step(loss_fn, model=model, optimizer=fa.sgd(lr=0.001))
        shards, state = fa.shard(torch.utils.data.DataLoader(torch.ones(6, 2))), train_step.init(seed=0)
        for state, _ in fa.scan(train_step, state, shards, steps=STEPS, track=run):
            if state.step == 2:
                fill(folder / "logs")
    print("STEP", state.step, "FAILURES", json.dumps(run.failures))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
