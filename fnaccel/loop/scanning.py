"""`scan`: the loop over data that every training script writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fnaccel.checkpoint.disk.retention import Retention
from fnaccel.collectives import any_process
from fnaccel.data import Shards, in_windows, open_on
from fnaccel.data.lengths import updates
from fnaccel.errors import ArgumentError, LoaderError, require
from fnaccel.loop.autosave import Autosave, Saver, Steps
from fnaccel.loop.leaving import LeftLoops
from fnaccel.loop.measured import Measures
from fnaccel.loop.nonfinite import NonfiniteLoss
from fnaccel.loop.preemption import SIGNALS
from fnaccel.loop.tracked import Bar, ByName, logged, trackers_of_rank
from fnaccel.program.train_step import TrainStep
from fnaccel.seeing.profile import Profile
from fnaccel.seeing.profile import profile as profiled
from fnaccel.seeing.report import ReportTracker, log_of
from fnaccel.seeing.throughput import Throughput
from fnaccel.seeing.versions import environment
from fnaccel.state import Position, TrainState, check_state, following, lease_of
from fnaccel.track.tracker import Tracker
from fnaccel.world.world import World


def check_shards(shards: Any, where: str) -> None:
    """Raise ArgumentError for anything but shards."""
    if not isinstance(shards, Shards):
        raise ArgumentError(
            f"a {type(shards).__name__} says nothing of how ranks share it",
            where=where,
            fix="fa.shard(loader)",
        )


def scan(
    train_step: TrainStep,
    state: TrainState,
    shards: Shards,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    max_seconds: float | None = None,
    progress: bool = False,
    trackers: Tracker | ByName | Iterable[Tracker | ByName] = (),
    log_every: int = 1,
    config: Mapping[str, Any] | None = None,
    directory: str | Path | None = None,
    save_every: int | None = None,
    keep: int | None = None,
    keep_every: int | None = None,
    each_machine: bool = False,
    background: bool = False,
    signals: Iterable[str] = SIGNALS,
    profile: str | Path | Profile | None = None,
    throughput: bool | Throughput = False,
    memory: bool = False,
    report: str | Path | None = None,
) -> Iterator[tuple[TrainState, dict[str, Any]]]:
    """Train over the data from the state's position, and yield each `(state, metrics)`.

    With a directory, a signal to any rank (schedulers send one before they end a job) lets all ranks
    finish the same step, save and end: `Preempted` is raised, a SystemExit with code 75. Started again
    with `fa.resume_or_init(directory, train_step)`, the run goes on from there.

    Args:
        train_step: the result of `fa.train_step`.
        state: its live state. The data goes on at `state.data`.
        shards: the result of `fa.shard`.
        steps: stop when `state.step` reaches this, passing over the data as often as needed.
        epochs: stop when this many epochs are complete. Without both: the rest of this epoch.
        max_seconds: stop after the step in which this many seconds of wall time are over on any rank. With
            several ranks each step then costs one small exchange between them.
        progress: show a bar with loss, rate and time left, on rank 0.
        trackers: rank 0 writes metrics to them, or the ranks that a tracker's `ranks` says. Each is an
            object, a name such as `"tensorboard"`, or a mapping of `name` and options. `"all"` stands for
            those installed. A tracker by name writes to `logs` in the directory, or without one to `runs`. A
            tracker that raises in `log` or `finish` does not end training: its first error is logged, and the
            number of its errors. A tracker that blocks does not stop it either: see docs/tracking.md.
        log_every: write each so many steps.
        config: shown by trackers beside the run. The plan and the environment are added.
        directory: save the state here, each `save_every` steps and at the end. None: nowhere. Step k is saved
            when the loop asks for step k + 1, so that changes of `state.extras` in its body are part of it,
            or is left by `break`, `return` or `close`. If an exception leaves the loop, nothing more is
            saved, and a warning says what is lost.
        save_every: None saves at the end only.
        keep, keep_every: how many of the newest checkpoints stay, and of which steps all: see `fa.save`.
        each_machine: machines do not share the directory: see `fa.save`.
        background: train on while a state is written. The end of the loop waits for it.
        signals: names of the signals that let a run with a directory save and end. `()` leaves signals alone.
            The handlers of before are back when the loop ends. Only the main thread can catch any.
        profile: record some steps on every rank, by `fa.profile`. A path: with its defaults.
        throughput: add `rows_per_second` and `data_wait` (from 0 to 1) to the metrics, with
            `fa.seeing.Throughput` also `tokens_per_second` and `mfu`. Nothing waits for it.
        memory: add the peak of memory in MiB, `peak_mib`, and that of each phase, such as
            `peak_mib/forward`. On the CPU it costs about 0.5 ms a step.
        report: write an HTML page about the run here at its end, and a JSONL log beside it. See
            `fnaccel report` for several runs, and for one that was cut off.

    Raises:
        LoaderError: an epoch holds nothing.
        ArgumentError: not shards, not a state, not a tracker, bad counts, or an option of another type.
        UnknownNameError: no such signal, or no tracker of this name.
        WorldError: a tracker is for a rank that the world does not have.
        CheckpointError: a save failed.
        Preempted: all ranks have saved because of a signal, and are to end.

    Example:
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), epochs=2, progress=True):
        ...     pass
        >>> state.step, state.data.epoch
        (6, 2)
    """
    check_shards(shards, "fa.scan")
    check_state(state, "fa.scan")
    for name, count in (("steps", steps), ("epochs", epochs)):
        require(
            count is None or (isinstance(count, int) and count >= 0),
            f"{name}={count!r}",
            "fa.scan",
            f"{name} is a count, from the beginning of the run",
        )
    require(
        max_seconds is None or max_seconds > 0,
        f"max_seconds={max_seconds!r}",
        "fa.scan",
        "max_seconds is more than 0",
    )
    require(
        isinstance(log_every, int) and log_every >= 1,
        f"log_every={log_every!r}",
        "fa.scan",
        "log_every is 1 or more",
    )
    require(
        config is None or isinstance(config, Mapping),
        f"config={config!r:.60}",
        "fa.scan",
        'config={"lr": 0.1}',
    )
    require(
        isinstance(throughput, bool | Throughput),
        f"throughput={throughput!r}",
        "fa.scan",
        "throughput=True, or fa.seeing.Throughput(...)",
    )
    # on all ranks, though rank 0 writes the page
    if report is not None:
        log_of(report)
    if profile is not None and not isinstance(profile, Profile):
        profile = profiled(profile)
    world = train_step.mesh.world
    writers = trackers_of_rank(trackers, world, directory, "fa.scan(trackers=)")
    if report is not None and world.is_main:
        writers = (*writers, ReportTracker(report))
    require(
        save_every is None or (save_every >= 1 and directory is not None),
        f"save_every={save_every!r} with directory={directory!r}",
        "fa.scan",
        "give a directory, and save_every of 1 or more",
    )
    require(
        directory is not None
        or (keep is None and keep_every is None and not background and not each_machine),
        f"keep={keep!r}, keep_every={keep_every!r}, each_machine={each_machine!r}, background={background!r} "
        "with nothing to save",
        "fa.scan",
        "give a directory",
    )
    Retention(keep, keep_every).check("fa.scan")
    if epochs is None and steps is None:
        epochs = state.data.epoch + 1
    measures = None
    if throughput or memory:
        what = Throughput() if throughput is True else throughput or None
        measures = Measures(train_step, what, memory=memory)
    taken = _steps(train_step, state, shards, steps, epochs, measures)
    if measures is not None:
        taken = _inside(measures, taken)
    if profile is not None:
        taken = _inside(profile, taken)
    if max_seconds is not None:
        taken = _until(max_seconds, taken, world)
    saver = None
    if directory is not None:
        plan = Autosave(
            directory=directory,
            every=save_every,
            keep=keep,
            keep_every=keep_every,
            each_machine=each_machine,
            background=background,
            signals=signals,
        )
        saver = Saver(plan, train_step)
        taken = saver.run(taken)
    shown = progress and world.is_main
    if writers or shown:
        # outermost, so that the last state is saved before a tracker ends
        bar = Bar(_total(train_step, state, shards, steps, epochs), state.step) if shown else None
        facts = {"plan": str(train_step.plan), "environment": environment(world)}
        taken = logged(taken, writers, {**(config or {}), **facts}, log_every, bar)
    return taken if saver is None else LeftLoops(taken, saver.leave)


def _steps(
    train_step: TrainStep,
    state: TrainState,
    shards: Shards,
    steps: int | None,
    epochs: int | None,
    measures: Measures | None,
) -> Steps:
    began = state.step
    nonfinite = NonfiniteLoss(speaks=train_step.mesh.world.is_main)
    while (steps is None or state.step < steps) and (epochs is None or state.data.epoch < epochs):
        started = state.step
        for batch in _run(train_step, shards, state, epochs):
            if measures is not None and state.step == began:
                measures.before(state, batch)
            position = state.data
            state, metrics = train_step(state, batch)
            nonfinite.look(state.step, metrics)
            if measures is not None:
                measures.add(batch, position, state.data, metrics)
            yield state, metrics
            if steps is not None and state.step >= steps:
                break
        if state.step == started:
            state = _next_epoch(state)
    train_step.settle()


def _run(train_step: TrainStep, shards: Shards, state: TrainState, epochs: int | None) -> Iterator[Any]:
    """The batches or windows from a state's position to the end of the epoch, or over it."""
    if not shards.across_epochs or shards.window is None:
        return _epoch(train_step, shards, state.data, step=state.step)
    each = train_step.mesh.batch_size if shards.per_rank else 1
    return in_windows(shards, _epochs(train_step, shards, state.data, epochs), state.step, each=each)


def _epochs(train_step: TrainStep, shards: Shards, position: Position, epochs: int | None) -> Iterator[Any]:
    """The batches of one epoch after the other."""
    while epochs is None or position.epoch < epochs:
        begun = position
        for batch in _epoch(train_step, shards, position):
            position = batch.position
            yield batch
        if position == begun:
            _check_some(position)
            position = Position(position.epoch + 1)


def _inside(context: contextlib.AbstractContextManager[Any], steps: Steps) -> Steps:
    """Pass steps on inside of a context."""
    with context, contextlib.closing(steps):
        yield from steps


def _until(seconds: float, steps: Steps, world: World) -> Steps:
    """Pass steps on until the time is over, on all ranks at the same step."""
    end = time.monotonic() + seconds
    with contextlib.closing(steps):
        for state, metrics in steps:
            yield state, metrics
            if any_process(time.monotonic() >= end, world=world):
                return


def _next_epoch(state: TrainState) -> TrainState:
    """A state that stands at the end of an epoch's data goes on with the next one."""
    _check_some(state.data)
    owner = lease_of(state, "fa.scan").owner
    return owner.succeed(following(state, data=Position(state.data.epoch + 1)))


def _check_some(position: Position) -> None:
    """Raise LoaderError for an epoch that yielded nothing from its beginning."""
    if position.samples == 0:
        raise LoaderError(
            f"epoch {position.epoch} of the data holds no batch",
            where="fa.scan",
            fix='give a loader with one item or more (with remainder="drop": one full batch or more)',
        )


def _epoch(train_step: TrainStep, shards: Shards, position: Position, *, step: int = 0) -> Iterator[Any]:
    return open_on(shards.at(position, step=step), train_step.mesh)


def _total(
    train_step: TrainStep, state: TrainState, shards: Shards, steps: int | None, epochs: int | None
) -> int | None:
    if steps is not None:
        return steps
    if epochs is None or state.data.samples:
        return None
    ranks, left = train_step.mesh.batch_size, epochs - state.data.epoch
    more = updates(shards, ranks, left, across=shards.across_epochs, first=state.step)
    return None if more is None else state.step + more
