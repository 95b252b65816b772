"""The measurement itself: one scope, in this process."""

from __future__ import annotations

import statistics
import time
from typing import Any

import attrs
import torch

from fnaccel import _torch
from fnaccel.benching.memory import Memory
from fnaccel.benching.subject import Subject
from fnaccel.benching.task import EAGER, Measured
from fnaccel.collectives import gather_objects
from fnaccel.config import apply
from fnaccel.data.batch import Window
from fnaccel.program.train_step import TrainStep
from fnaccel.state import TrainState
from fnaccel.transforms import compile  # noqa: A004
from fnaccel.world.devices import generators_of
from fnaccel.world.world import World

WARM_UPS = 3
"""Steps between the first step and the timed steps. Their losses and the first step's are compared."""


def measure(subject: Subject, scope: Any, steps: int, world: World) -> Measured:
    """Train on one batch, and time the steps.

    Args:
        subject: the step, the model and the batch.
        scope: `"eager"`, or a scope of `fa.compile`.
        steps: the number of timed steps.
        world: the ranks. All of them call this, and all get the same peak.

    Raises:
        FnaccelError: the strategy can't do it. Errors of model, loss and compiler pass as they are.
    """
    # before `compile`: some scopes import the compiler at once, and the memory of that import counts
    memory = Memory.watch(world.device)
    step = subject.step if scope == EAGER else compile(subject.step, scope)
    recipe = attrs.evolve(subject.recipe, compile=None)
    train_step = apply(recipe, step, subject.model, world=world)
    state = train_step.init(seed=0)
    times: list[float] = []
    losses: list[float] = []
    for number in range(1 + WARM_UPS + steps):
        _wait(world)
        start = time.perf_counter()
        state, metrics = train_step(state, subject.batch)
        _wait(world)
        times.append(time.perf_counter() - start)
        if number <= WARM_UPS:
            losses.append(float(metrics["loss"]))
    peak = memory.peak()
    hits, misses = (0, 0) if scope == EAGER else _torch.compile_cache_counts()
    return Measured(
        first=times[0],
        seconds=statistics.median(times[1 + WARM_UPS :]),
        peak=max(gather_objects(peak, world=world)),
        losses=losses,
        draws=_draws(train_step, state, subject, world) if scope == EAGER else False,
        cache_hits=hits,
        cache_misses=misses,
        device=world.device.type,
    )


def _wait(world: World) -> None:
    """Wait until the device has finished all queued work."""
    if world.device.type != "cpu":
        torch.accelerator.synchronize()


def _draws(train_step: TrainStep, state: TrainState, subject: Subject, world: World) -> bool:
    """Whether a forward advances torch's generators, as any dropout does (a module or a function)."""
    micros: Any = subject.batch if isinstance(subject.batch, Window) else (subject.batch,)
    before = [generator.get_state() for generator in generators_of(world.device)]
    train_step.look(state, subject.step.loss_fn, micros[0], train=True)
    after = [generator.get_state() for generator in generators_of(world.device)]
    return not all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
