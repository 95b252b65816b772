"""How many functions and files of fnaccel one steady call enters: an update, a save, a restore.

    OMP_NUM_THREADS=1 python benchmarks/trip.py

Counts, no times: they are the same on every machine. `tests/surface/test_trip.py` holds their ceilings.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.testing import RankPool

ROOT = fa.__file__.rsplit("/", 1)[0] + "/"


@attrs.frozen
class Trip:
    """What one call enters. A border is a call from one file of the library to another."""

    functions: int
    files: int
    borders: int
    frames: int = 0  # of the library under the user's loss


def traced(call: Callable[[], Any]) -> tuple[Any, Trip]:
    """The result of a call, and its trip."""
    entered: set[tuple[str, str]] = set()
    last, borders, frames = "", 0, 0

    def profiler(frame: Any, event: str, _: object) -> None:
        nonlocal last, borders, frames
        path = frame.f_code.co_filename
        if event != "call":
            return
        if path.startswith(ROOT):
            entered.add((path, frame.f_code.co_qualname))
            borders += path != last
            last = path
        elif frame.f_code is _loss.__code__:
            frames, above = 0, frame.f_back
            while above and above.f_code.co_filename != __file__:
                frames += above.f_code.co_filename.startswith(ROOT)
                above = above.f_back

    sys.setprofile(profiler)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, Trip(len(entered), len({path for path, _ in entered}), borders, frames)


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> fa.Mean:
    x, y = batch
    return fa.Mean((model(x) - y).square().sum(), weight=len(y))


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def trips(strategy: str, *, captured: bool = False) -> dict[str, Trip]:
    """The trips of a train step with 2 micro-batches, bf16 and clipping, inside a world."""
    x, y = torch.randn(64, 6), torch.randn(64, 1)
    shards = fa.shard(DataLoader(TensorDataset(x, y), batch_size=4))
    step = fa.clip_norm(fa.with_precision(fa.accumulate(_loss, 2), "bf16"), 1.0)
    step = fa.compile(step, scope="step", backend="aot_eager") if captured else step
    train_step = fa.train_step(step, model=fa.distribute(_model, strategy), optimizer=fa.adamw(1e-3))
    state = train_step.init(seed=0)
    batch = next(iter(shards))
    for _ in range(4):
        state, _ = train_step(state, batch)
    found: dict[str, Trip] = {}
    (state, _), found["update"] = traced(lambda: train_step(state, batch))
    if strategy == "local" and not captured:
        with tempfile.TemporaryDirectory() as folder:
            fa.save(folder, state, step=90)
            _, found["save"] = traced(lambda: fa.save(folder, state, step=91))
            state, found["restore"] = traced(lambda: fa.restore(folder, like=state))
    train_step.close()
    return found


def measured() -> dict[str, Trip]:
    """All trips by name."""
    found: dict[str, Trip] = {}
    with RankPool(1) as one:
        found |= one.run(trips, "local")[0]
        found["captured update"] = one.run(_captured)[0]["update"]
    with RankPool(2) as two:
        found["fsdp update"] = two.run(trips, "fsdp")[0]["update"]
    return found


def _captured() -> dict[str, Trip]:
    return trips("local", captured=True)


def main() -> None:
    """Print them."""
    for name, trip in measured().items():
        frames = f", {trip.frames} frames under the loss" if trip.frames else ""
        print(f"{name}: {trip.functions} functions, {trip.files} files, {trip.borders} borders{frames}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
