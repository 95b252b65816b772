"""The cost of seeing a run: trackers, progress bar, throughput, memory, profiler marks.

    OMP_NUM_THREADS=1 python benchmarks/seeing.py [--quick]

The eager step of a tiny MLP from a loader, by `fa.scan`, bare and with more and more to see. Each contestant
has a process of its own, since whoever watches a step watches all steps of its process. They take turns in
short blocks, as in the other benchmarks.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from interleave import Samples, timed_block, turns
from models import mlp, our_loss, our_optimizer, rows
from options import begin
from report import Row, compare, publish
from torch.utils.data import DataLoader

import fnaccel as fa
from fnaccel.testing import RankPool
from fnaccel.track import JsonlTracker, TensorBoardTracker

BARE = "bare fa.scan"
GOAL = 1.05
NAMES = (
    BARE, "log_every=50", "log_every=1", "throughput alone", "progress alone", "JSONL, log_every=1", "memory",
)  # fmt: skip
_loop: Iterator[Any] | None = None


def _options(name: str, folder: Path) -> dict[str, Any]:
    """What each contestant sees."""
    trackers = [JsonlTracker(folder / "log.jsonl"), TensorBoardTracker(directory=folder / "events")]
    seen = {"progress": True, "watch": fa.Watch(throughput=True)}
    return {
        BARE: {},
        "log_every=50": {**seen, "track": fa.Tracking(*trackers, every=50)},
        "log_every=1": {**seen, "track": trackers},
        "throughput alone": {"watch": fa.Watch(throughput=True)},
        "progress alone": {"progress": True},
        "JSONL, log_every=1": {"track": trackers[:1]},
        "memory": {"watch": fa.Watch(memory=True)},
    }[name]


def start(name: str, folder: Path) -> list[float]:
    """Begin a loop in this process. The losses of its first steps."""
    global _loop
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the progress bar
    gc.disable()  # it runs between blocks, as in all benchmarks
    gc.freeze()
    fa.start()
    model = fa.distribute(mlp, fa.local())
    train_step = fa.train_step(fa.clip_norm(our_loss, 1.0), model=model, optimizer=our_optimizer())
    shards = fa.shard(DataLoader(rows(), batch_size=32))
    _loop = fa.scan(train_step, train_step.init(seed=0), shards, epochs=1_000_000, **_options(name, folder))
    return [float(next(_loop)[1]["loss"]) for _ in range(4)]


def block(calls: int) -> float:
    """Seconds for each step."""
    assert _loop is not None
    return timed_block(_loop.__next__, calls)


def measure(blocks: int, calls: int) -> Samples:
    """Seconds for each step of each contestant."""
    folder = Path(tempfile.mkdtemp())
    pools = {name: RankPool(1, timeout=600.0) for name in NAMES}
    taken: Samples = {name: [] for name in NAMES}
    try:
        firsts = [pools[name].run(start, name, folder / str(i))[0] for i, name in enumerate(NAMES)]
        if any(first != firsts[0] for first in firsts):
            raise SystemExit(f"the losses differ: {firsts}")
        for counts, name in turns(NAMES, blocks):
            seconds = pools[name].run(block, calls)[0]
            if counts:
                taken[name].append(seconds)
    finally:
        for pool in pools.values():
            pool.close()
        shutil.rmtree(folder)
    return taken


def marks() -> float:
    """Seconds for a mark that nobody listens to."""
    from fnaccel.world.progress_marks import enter

    began = time.perf_counter()
    for _ in range(10_000):
        enter("forward")
    return (time.perf_counter() - began) / 10_000


def main() -> None:
    """Run everything."""
    options = begin("seeing", str(__doc__))
    samples = measure(options.pick(25, 5, 1), options.pick(100, 100, 5))
    table: list[Row] = []
    for name, seconds in samples.items():
        if name != BARE:
            goals = {BARE: GOAL} if name == "log_every=50" else {}
            shown = {"log_every=50": "JSONL, TensorBoard, progress, throughput; log_every=50"}
            shown["log_every=1"] = shown["log_every=50"].replace("50", "1")
            table += compare(shown.get(name, name), {"fnaccel": seconds, BARE: samples[BARE]}, goals)
    listened = [7 * marks() for _ in samples[BARE]]
    table += compare("seven marks of a step", {"fnaccel": listened, BARE: samples[BARE]})
    publish(options, table)


if __name__ == "__main__":
    main()
