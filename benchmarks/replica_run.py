"""One job of `replicas.py`: trains the GPT of examples/train_gpt.py, and prints its cost as one line of JSON.

fnaccel launch -n 2 benchmarks/replica_run.py "local_sgd(every=16)" 256
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from torch.utils.data import DataLoader, Subset
from train_gpt import GPT, Sources, loss_fn

import fnaccel as fa

ROWS, HELD_OUT, LAST = 16, 512, 32


def sent() -> int:
    """Bytes that this machine has sent over all its network interfaces."""
    return sum(int(path.read_text()) for path in Path("/sys/class/net").glob("*/statistics/tx_bytes"))


def main() -> None:
    """Train, and print losses, bytes and seconds of this rank."""
    strategy, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    text = Sources()
    train = Subset(text, range(len(text) - HELD_OUT))
    held_out = Subset(text, range(len(text) - HELD_OUT, len(text)))
    with fa.start(device="cpu") as world:
        model = fa.distribute(GPT, strategy)
        train_step = fa.train_step(fa.clip_norm(loss_fn, 1.0), model=model, optimizer=fa.adamw(3e-3))
        first, losses, seconds = train_step.init(seed=0), [], []
        shards = fa.shard(DataLoader(train, batch_size=ROWS, shuffle=True), seed=1)
        before, last = 0, 0.0
        for state, metrics in fa.scan(train_step, first, shards, steps=steps):
            losses.append(float(metrics["loss"]))
            now = time.perf_counter()
            if state.step == 1:
                before = sent()  # the first step also connects, and compares models
            else:
                seconds.append(now - last)
            last = now
        found = {
            "train": sum(losses[-LAST:]) / LAST,
            "bytes": (sent() - before) / (steps - 1),
            "seconds": seconds,
            "rank": world.rank,
        }
        if train_step.engine.layout.whole_from(steps) == steps:
            batches = fa.shard(DataLoader(held_out, batch_size=ROWS))
            found["held_out"] = float(fa.evaluate(train_step, state, loss_fn, batches))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
