"""`scan(..., save=)`: saves states during the loop, at its end, and on a stop request."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from fnaccel.checkpoint.disk.retention import Retention
from fnaccel.collectives import any_process
from fnaccel.errors import FnaccelError, Preempted, as_names
from fnaccel.loop.evaluating import Evaluations, Every, Steps, Turns, Work, check_every
from fnaccel.loop.preemption import SIGNALS, preemption
from fnaccel.program.train_step import TrainStep
from fnaccel.state import TrainState
from fnaccel.world.paths import local_path

if TYPE_CHECKING:
    from fnaccel.checkpoint import Saving

TOGETHER = 10.0
"""Seconds for which a rank that has left its loop waits for the others, before it saves."""


@attrs.frozen
class Autosave:
    """Where and when `fa.scan(save=)` saves the state. A path alone saves at the end.

    Step k is saved when the loop asks for step k + 1, so that changes of `state.extras` in its body are part
    of it, or is left by `break`, `return` or `close`. If an exception leaves the loop, nothing more is
    saved, and a warning says what is lost.

    Attributes:
        directory: the root of the checkpoints.
        every: steps between two saves, or `"epoch"`: after each. None: at the end only.
        keep, keep_every: how many of the newest checkpoints stay, and of which steps all: see `fa.save`.
        each_machine: machines do not share the directory: see `fa.save`.
        background: train on while a state is written. The end of the loop waits for it.
        signals: names of the signals that let the run save and end. `()` leaves signals alone. The handlers
            of before are back when the loop ends. Only the main thread can catch any.

    Raises:
        ArgumentError: no path, or bad counts.

    Example:
        >>> plan = fa.Autosave("runs/gpt", every=2, keep=3)
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), save=plan):
        ...     pass
        >>> [checkpoint.step for checkpoint in fa.checkpoint.checkpoints("runs/gpt")]
        [2, 3]
    """

    directory: str | Path = attrs.field(
        converter=lambda path: local_path(path, "fa.Autosave(directory)").absolute()
    )
    every: Every | None = attrs.field(default=None, kw_only=True)
    keep: int | None = attrs.field(default=None, kw_only=True)
    keep_every: int | None = attrs.field(default=None, kw_only=True)
    each_machine: bool = attrs.field(default=False, kw_only=True)
    background: bool = attrs.field(default=False, kw_only=True)
    signals: Iterable[str] = attrs.field(default=SIGNALS, converter=as_names, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_every("fa.Autosave", self.every)
        Retention(self.keep, self.keep_every).check("fa.Autosave")


@attrs.define
class Saver:
    """Saves each step of a loop once, one save at a time.

    Attributes:
        plan: where, and when.
        work: of the loop.
        evaluations: say which steps to save besides, and what is kept of them.
        last: the newest state that the loop was given.
        step, path: of the newest save.
        pending: the save that is under way in the background.
    """

    plan: Autosave
    work: Work
    evaluations: Evaluations
    last: TrainState | None = None
    step: int | None = None
    path: Path | None = None
    pending: Saving | None = None

    def run(self, steps: Steps) -> Steps:
        """Pass steps on, and save their states.

        Raises:
            Preempted: a signal came to any rank. The state of the last step is saved.
            CheckpointError: a save failed.
        """
        self._check_extras()
        # inside out: the save under way ends first, and the signal handlers are restored after it
        with (
            preemption(self.train_step, signals=self.plan.signals) as notice,
            self._until_written(),
            contextlib.closing(steps),
        ):
            due, turns = False, Turns(self.plan.every, self.work)
            for state, metrics in steps:
                self.last = state
                yield state, metrics
                # not before the loop asks for the next step: its body may still change `extras`
                due = turns.come(state) or due or self.evaluations.to_save
                waits = not self.work.is_whole(state) and (due or notice.stopping)
                if waits and not self._may_stop(notice, state):
                    continue  # a few steps later ranks are the same again, and the batch is done
                if notice.stopping:
                    break
                if due:
                    self.save(state)
                    due = False
            if self.last is None:
                return
            self.save(self.last)
            if self.plan.signals:  # ranks are together here, so a signal during the last step is not lost
                notice.agree(any_process(notice.asked, world=self.train_step.mesh.world))
            if notice.stopping:
                raise Preempted(self.last.step, self.wait())

    def _check_extras(self) -> None:
        """See before the first step that the user's part of the state can be saved."""
        from fnaccel.checkpoint.saving import check_extras  # noqa: PLC0415 - only if states are saved

        state = self.train_step.live_state
        if state is not None:
            check_extras(state.extras, "fa.scan(save=)", self.train_step.mesh.world)

    def _may_stop(self, notice: Any, state: TrainState) -> bool:
        """Whether the loop ends here, and the values of each replica can be saved."""
        apart = self.train_step.engine.layout.of_replicas is not None
        return notice.stopping and apart and self.work.batch_ended(state)

    @property
    def train_step(self) -> TrainStep:
        """Its states are saved."""
        return self.work.train_step

    def save(self, state: TrainState) -> None:
        """Save a state, unless its step is saved. Between averages of replicas only as a loop ends."""
        from fnaccel.checkpoint import save, save_async  # noqa: PLC0415 - only if states are saved

        if state.step == self.step:
            return
        plan = self.plan
        options: dict[str, Any] = {
            "keep": plan.keep,
            "keep_every": plan.keep_every,
            "metrics": self.evaluations.metrics(state.step),
            "each_machine": plan.each_machine,
        }
        if plan.background and self.work.is_whole(state):
            self.pending = save_async(plan.directory, state, **options)
        else:
            self.path = save(plan.directory, state, between=True, **options)
        self.step = state.step

    def leave(self, on_purpose: bool) -> None:
        """Save the last step of a loop that is left. If that can't be, warn of what is lost.

        Args:
            on_purpose: whether the loop was left by `break`, `return` or `close`.
        """
        from fnaccel.checkpoint import checkpoints  # noqa: PLC0415 - only if states are saved

        # the body may have made steps of its own
        state = self.last and (self.train_step.live_state or self.last)
        if state is None or state.step == self.step:
            return
        saved = "which has no step of this loop" if self.step is None else f"where the newest is {self.step}"
        world = self.train_step.mesh.world
        why = "an exception left the loop, or its iterator was dropped elsewhere"
        alone = on_purpose and not world.all_come(TOGETHER)
        if alone:
            why = f"not all ranks left the loop after this step, within {TOGETHER:g} s"
        elif on_purpose and not self.work.batch_ended(state):
            why = "the loop was left between two updates on one batch"
        elif on_purpose:
            try:
                self.save(state)
                self.wait()
            except (FnaccelError, RuntimeError, OSError) as error:
                why = f"{type(error).__name__}: {error.what if isinstance(error, FnaccelError) else error}"
            else:
                return
        self.last = None  # said once
        if any(each.step == state.step for each in checkpoints(self.plan.directory)):  # by the script itself
            return
        if world.is_main or alone:
            text = f"step {state.step} is not saved in {self.plan.directory}, {saved}: {why}"
            fix = "fa.save(directory, train_step.live_state) saves what is live"
            warnings.warn(f"{text}. {fix}", UserWarning, stacklevel=3)

    def wait(self) -> Path | None:
        """Wait for the save in the background. Returns the path of the newest checkpoint."""
        pending, self.pending = self.pending, None
        if pending is not None:
            last, self.last = self.last, None  # if it fails, its error says what is lost
            self.path = pending.wait()
            self.last = last
        return self.path

    @contextlib.contextmanager
    def _until_written(self) -> Generator[None]:
        try:
            yield
        finally:
            self.wait()
