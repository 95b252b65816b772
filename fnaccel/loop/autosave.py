"""`scan(..., directory=)`: saves states during the loop, at its end, and on a stop request."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from fnaccel.collectives import any_process
from fnaccel.errors import Preempted
from fnaccel.loop.preemption import SIGNALS, preemption
from fnaccel.program.train_step import TrainStep
from fnaccel.state import TrainState
from fnaccel.world.paths import local_path

if TYPE_CHECKING:
    from fnaccel.checkpoint import Saving

Steps = Generator[tuple[TrainState, dict[str, Any]]]


@attrs.frozen(kw_only=True)
class Autosave:
    """The directory for states, and when to save them.

    Attributes:
        directory: the root of the checkpoints.
        every: steps between two saves. None: at the end only.
        keep, keep_every, each_machine: arguments of `fa.save`.
        background: whether training goes on while a state is written.
        signals: the signals that let the run save and end.
    """

    directory: str | Path = attrs.field(
        converter=lambda path: local_path(path, "fa.scan(directory=)").absolute()
    )
    every: int | None = None
    keep: int | None = None
    keep_every: int | None = None
    each_machine: bool = False
    background: bool = False
    signals: tuple[str, ...] = attrs.field(default=SIGNALS, converter=tuple[str, ...])

    def run(self, train_step: TrainStep, steps: Steps) -> Steps:
        """Pass steps on, and save their states.

        Raises:
            Preempted: a signal came to any rank. The state of the last step is saved.
            CheckpointError: a save failed.
        """
        # inside out: the save under way ends first, and the signal handlers are restored after it
        with (
            preemption(train_step, signals=self.signals) as notice,
            _Saver(self) as saver,
            contextlib.closing(steps),
        ):
            state: TrainState | None = None
            for state, metrics in steps:
                yield state, metrics
                # not before the loop asks for the next step: its body may still change `extras`
                if notice.stopping:
                    break
                if self.every is not None and state.step % self.every == 0:
                    saver.save(state)
            if state is None:
                return
            saver.save(state)
            if self.signals:  # ranks are together here, so a signal during the last step is not lost
                notice.agree(any_process(notice.asked, world=train_step.mesh.world))
            if notice.stopping:
                raise Preempted(state.step, saver.wait())


@attrs.define
class _Saver:
    """Saves each step once, one save at a time."""

    plan: Autosave
    step: int | None = None
    path: Path | None = None
    pending: Saving | None = None

    def save(self, state: TrainState) -> None:
        from fnaccel.checkpoint import save, save_async  # noqa: PLC0415 - only if states are saved

        if state.step == self.step:
            return
        plan = self.plan
        options: dict[str, Any] = {
            "keep": plan.keep,
            "keep_every": plan.keep_every,
            "each_machine": plan.each_machine,
        }
        if plan.background:
            self.pending = save_async(plan.directory, state, **options)
        else:
            self.path = save(plan.directory, state, **options)
        self.step = state.step

    def wait(self) -> Path | None:
        pending, self.pending = self.pending, None
        if pending is not None:
            self.path = pending.wait()
        return self.path

    def __enter__(self) -> _Saver:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
