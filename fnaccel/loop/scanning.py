"""`scan`: the loop over data that every training script writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fnaccel.collectives import any_process
from fnaccel.data import Batch, Shards, in_windows, open_on
from fnaccel.data.lengths import updates
from fnaccel.errors import LoaderError, moved_arguments, require, require_counts
from fnaccel.loop.autosave import Autosave, Saver, Steps
from fnaccel.loop.evaluating import Evaluate, Evaluations, Work, check_shards
from fnaccel.loop.leaving import LeftLoops
from fnaccel.loop.measured import Measures, Watch, collected
from fnaccel.loop.nonfinite import NonfiniteLoss
from fnaccel.loop.tracked import Bar, logged
from fnaccel.loop.tracking import Track, as_tracking, of_rank
from fnaccel.program.train_step import TrainStep
from fnaccel.seeing.versions import environment
from fnaccel.state import Position, TrainState, check_state, following, lease_of


@moved_arguments(
    "fa.scan",
    directory='save="runs/gpt", or save=fa.Autosave("runs/gpt", every=100)',
    save_every='save=fa.Autosave("runs/gpt", every=100)',
    keep='save=fa.Autosave("runs/gpt", keep=3)',
    keep_every='save=fa.Autosave("runs/gpt", keep=3, keep_every=1000)',
    each_machine='save=fa.Autosave("runs/gpt", each_machine=True)',
    background='save=fa.Autosave("runs/gpt", background=True)',
    signals='save=fa.Autosave("runs/gpt", signals=["SIGTERM"])',
    trackers='track="wandb", or track=fa.Tracking("wandb", "jsonl")',
    log_every='track=fa.Tracking("wandb", every=10)',
    config='track=fa.Tracking("wandb", config={"lr": 0.1})',
    report='track=fa.Tracking(report="run.html")',
    profile='watch=fa.Watch(profile="runs/trace")',
    throughput="watch=fa.Watch(throughput=True)",
    memory="watch=fa.Watch(memory=True)",
)
def scan(
    train_step: TrainStep,
    state: TrainState,
    shards: Shards,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    max_seconds: float | None = None,
    given: Mapping[str, Any] | None = None,
    before: Callable[[TrainState, Batch], Any] | None = None,
    after: Callable[[TrainState, dict[str, Any], Any], TrainState] | None = None,
    updates_per_batch: int = 1,
    progress: bool = False,
    evaluate: Evaluate = None,
    save: str | Path | Autosave | None = None,
    track: Track = None,
    watch: Watch | None = None,
) -> Iterator[tuple[TrainState, dict[str, Any]]]:
    """Train over the data from the state's position, and yield each `(state, metrics)`.

    With `save=`, a signal to any rank (schedulers send one before they end a job) lets all ranks
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
        given: of each call of the train step: states of other train steps, numbers, tensors, schedules.
        before: `before(state, batch) -> batch`, called with each batch on its device, and of a window with
            each of its batches: rollouts by `train_step.look(state, ...)`, augmentation, targets of another
            model. It returns `batch.replace(data)`, or the new data alone.
        after: `after(state, metrics, batch) -> state`, called after each update with what was trained on. It
            returns the state, or `state.with_extras(...)`, which is part of the checkpoint of that step.
        updates_per_batch: so many updates on each batch. Saves, evaluations, `steps`, `max_seconds` and stop
            requests wait for the last of them, because a rollout can't be made again from other parameters. A
            loop that is left between them by `break` saves nothing more.
        progress: show a bar with loss, rate and time left, on rank 0.
        evaluate: evaluate during the loop as `fa.Evaluation` says, or as several with names of their own do.
            Metrics such as `eval/loss` are in those of that step, and are logged.
        save: save the state in this directory at the end, or as `fa.Autosave` says. None: nowhere.
        track: write metrics to these trackers: an object, a name such as `"tensorboard"`, a mapping of `name`
            and options, several of these, or `fa.Tracking`. A tracker that raises in `log` or `finish` does
            not end training: its first error is logged, and the number of its errors. A tracker that blocks
            does not stop it either: see docs/tracking.md.
        watch: record profiles, throughput or memory: `fa.Watch(throughput=True)`.

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
        watch is None or isinstance(watch, Watch),
        f"watch={watch!r}",
        "fa.scan",
        "watch=fa.Watch(throughput=True)",
    )
    plan = save if isinstance(save, Autosave | None) else Autosave(save)
    tracking, world = as_tracking(track), train_step.mesh.world
    shown = progress and world.is_main
    opened = tracking.opened("fa.scan(track=)", None if plan is None else Path(plan.directory))
    writers = of_rank(opened, world)
    if epochs is None and steps is None:
        epochs = state.data.epoch + 1

    # each part is a generator around the steps of those before it
    measures = None
    if watch is not None and (watch.throughput or watch.memory):
        measures = Measures(train_step, watch)
    require_counts("fa.scan", updates_per_batch=updates_per_batch)
    require(
        updates_per_batch == 1 or not callable(shards.window),
        f"updates_per_batch={updates_per_batch}, and the size of a window depends on the step",
        "fa.scan",
        "a window of one size, or one update on each",
    )
    work = Work(train_step, given, before, after, updates_per_batch, state.step, state.data.epoch)
    taken = _steps(work, state, shards, steps, epochs, measures)
    if measures is not None:
        taken = _inside(measures, taken)
    if watch is not None and watch.gc_every is not None:
        taken = collected(watch.gc_every, taken)
    if watch is not None and watch.profile is not None:
        taken = _inside(watch.profile, taken)
    if max_seconds is not None:
        taken = _until(max_seconds, taken, work)
    evaluations = Evaluations(work, evaluate, None if plan is None else Path(plan.directory), shown)
    if evaluations.records:
        taken = evaluations.run(taken, state)
    saver = None
    if plan is not None:
        saver = Saver(plan, work, evaluations)
        taken = saver.run(taken)
    taken = _told(taken, train_step, saver)
    if writers or shown:
        # outermost, so that the last state is saved before a tracker ends
        # before the first update of this process a later step is that of a checkpoint
        resumed = state.step > 0 and not lease_of(state, "fa.scan").owner.instance.learned.moved
        total = _total(work, state, shards, steps, epochs)
        bar = Bar(total, state, epochs, resumed) if shown else None
        facts: dict[str, Any] = {"plan": str(train_step.plan), "environment": environment(world)}
        if state.step:
            facts["resumed_at"] = state.step
        taken = logged(taken, writers, {**tracking.config, **facts}, tracking.every, bar, evaluations)
    return taken if saver is None else LeftLoops(taken, saver.leave)


def _steps(
    work: Work,
    state: TrainState,
    shards: Shards,
    steps: int | None,
    epochs: int | None,
    measures: Measures | None,
) -> Steps:
    began, train_step = state.step, work.train_step
    nonfinite = NonfiniteLoss(speaks=train_step.mesh.world.is_main)
    while (steps is None or state.step < steps) and (epochs is None or state.data.epoch < epochs):
        started = state.step
        for batch in _run(train_step, shards, state, epochs):
            if measures is not None and state.step == began:
                measures.before(state, batch)
            prepared = work.prepared(state, batch)
            for _ in range(work.updates_per_batch):
                position = state.data
                state, metrics = work.update(state, prepared)
                nonfinite.look(state.step, metrics)
                if measures is not None:
                    measures.add(prepared, position, state.data, metrics)
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
    return in_windows(shards, _epochs(train_step, shards, state.data, epochs), state.step)


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


def _told(steps: Steps, train_step: TrainStep, saver: Saver | None) -> Steps:
    """Pass steps on. A Ctrl-C says after which step it came, and what was saved last."""
    try:
        yield from steps
    except KeyboardInterrupt as interrupt:
        live, saved = train_step.live_state, saver and saver.path
        at = "in the middle of an update" if live is None else f"after step {live.step}"
        interrupt.add_note(f"fa.scan was interrupted {at}, and saved last: {saved or 'nothing'}")
        raise


def _until(seconds: float, steps: Steps, work: Work) -> Steps:
    """Pass steps on until the time is over, on all ranks at the same step."""
    end = time.monotonic() + seconds
    with contextlib.closing(steps):
        for state, metrics in steps:
            yield state, metrics
            over = time.monotonic() >= end
            if work.batch_ended(state) and any_process(over, world=work.train_step.mesh.world):
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
    work: Work, state: TrainState, shards: Shards, steps: int | None, epochs: int | None
) -> int | None:
    if steps is not None:
        return steps
    if epochs is None or state.data.samples:
        return None
    ranks, left = work.train_step.mesh.batch_size, epochs - state.data.epoch
    more = updates(shards, ranks, left, across=shards.across_epochs, first=state.step)
    return None if more is None else state.step + more * work.updates_per_batch
