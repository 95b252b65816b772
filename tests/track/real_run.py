"""A training run that logs to one tracker by name, in a process of its own: `python real_run.py NAME FOLDER OPTIONS`.

Beside it a `JsonlTracker` writes `expected.jsonl`: the values that the other tracker has to hold.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

STEPS = 3
CONFIG = {"lr": 0.01, "model": {"width": 2, "name": "linear"}, "nothing": None}
TEXT = "warm, up"
OPTIONS = {  # of one call. Those of trackers that a run does not have are ignored
    "aim": {"context": {"part": "first"}},
    "comet": {"epoch": 1},
    "dvclive": {"timestamp": True},
    "mlflow": {"synchronous": True},
    "tensorboard": {"walltime": 1.5},
    "wandb": {"commit": False},
}
TABLE = (["word", "count"], [["a", 1], ["b|c", 2]])
ROOT = Path(__file__).parents[2]


@cache
def without_network():
    """The command that starts another one without a network, or nothing if this user may not."""
    for command in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        if (
            shutil.which("unshare")
            and subprocess.run([*command, "true"], capture_output=True).returncode == 0
        ):
            return command
    return []


def start(name, folder, env=None, before=(), **options):
    """Run a training in `folder` that logs to the tracker `name`, and return what it printed."""
    arguments = [name, str(folder), json.dumps(options)]
    done = subprocess.run(
        [*before, *without_network(), sys.executable, str(Path(__file__)), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def main(name, folder, options):
    import matplotlib as mpl
    import torch
    import torch.nn.functional as F
    from torch import nn

    import fnaccel as fa

    mpl.use("Agg")
    from matplotlib import pyplot

    def loss_fn(model, batch):
        x, y = batch
        return fa.Mean(F.mse_loss(model(x), y, reduction="sum"), weight=y.numel())

    data = torch.utils.data.TensorDataset(torch.arange(12.0).reshape(6, 2), torch.ones(6, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    trackers = [
        "all" if name == "all" else {"name": name, **options},
        fa.track.JsonlTracker(folder / "expected.jsonl"),
    ]
    with fa.start(device="cpu"), fa.tracked(fa.Tracking(*trackers, config=CONFIG, directory=folder)) as run:
        model = fa.distribute(lambda: nn.Linear(2, 1), fa.local())
        step = fa.clip_norm(loss_fn, 1.0)
        train_step = fa.train_step(step, model=model, optimizer=fa.sgd(lr=0.001))
        shards, state = fa.shard(loader), train_step.init(seed=0)
        for state, _ in fa.scan(train_step, state, shards, steps=STEPS, track=run):
            if state.step == 2:
                figure, axes = pyplot.subplots(figsize=(1, 1))
                axes.plot([1, 2])
                run.log(
                    {"note": TEXT, "eval": {"width": 2}}, options=OPTIONS
                )  # at the step of the row before
                run.log_images(2, "digits", torch.full((3, 4, 5), 0.5))
                run.log_figure(2, "curve", figure)
                run.log_table(2, "words", *TABLE)
                (folder / "notes.txt").write_text("kept")
                run.log_artifact(folder / "notes.txt")
        tracker = run.trackers[0]
        native = tracker.native
        taken = tracker.log_options() if hasattr(tracker, "log_options") else ()
        print("OPTIONS", *sorted(taken))
        print("NATIVE", type(native).__module__, type(native).__name__)
    print("FAILURES", run.failures)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
