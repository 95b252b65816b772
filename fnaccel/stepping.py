"""One update of a live state, eager or captured; who may call it is `program`'s business."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch

from fnaccel.compiled import Compilation, Meter
from fnaccel.engine import Call, Micro
from fnaccel.gradients import Gradients
from fnaccel.lending import Given
from fnaccel.lowering import Lowered, keep_own
from fnaccel.notice import Notice
from fnaccel.optim import kernels
from fnaccel.owned import Owned
from fnaccel.state import Position, TrainState, donate
from fnaccel.step import Info

Rng = Literal["fold", "stream"]


class Stepper:
    """Carries out the updates of one train step."""

    def __init__(self, lowered: Lowered, rng: Rng, where: str) -> None:
        self._lowered = lowered
        self._rng = rng
        self._where = where
        self._meter: Meter | None = None
        self.reset()

    def reset(self) -> None:
        """Forget what was compiled, for modules that are made anew."""
        settings = self._lowered.compile
        self._meter = None if settings is None else Meter(settings, self._where)

    @property
    def compilation(self) -> Compilation | None:
        """What was compiled so far; None where nothing is to be."""
        return None if self._meter is None else self._meter.found

    def move(
        self,
        owned: Owned,
        state: TrainState,
        micros: Sequence[Micro],
        position: Position | None,
        lent: Given | None,
        notice: Notice | None,
    ) -> tuple[TrainState, dict[str, Any]]:
        """The next state (not leased yet) and the metrics.

        `state` is donated at the first change of a parameter; what fails before leaves it live.
        """
        meter = self._meter
        if meter is not None:
            meter.check()
        owned.train()
        before = _Before(state)
        call = self._call(state, lent, notice)
        watched = contextlib.nullcontext() if meter is None else meter.watch([m.data for m in micros])
        frozen = contextlib.nullcontext() if lent is None else lent.frozen()
        with frozen, watched:
            if owned.whole is None:
                grads, report = owned.engine.grads(self._lowered.loss, micros, call)
                metrics, skip = report.finish(), None
            else:
                grads, metrics, skip = self._captured(owned, state, micros, call)
        transforms = before.transforms
        if grads is not None:
            skip = self._tail(owned, state, grads, metrics, transforms)
        donate(state)  # where the update was captured; else it was donated before it
        if meter is not None:
            metrics["recompilations"] = meter.found.recompilations
        after: Any = before.updates + 1
        if skip is not None:
            counted = isinstance(before.updates, torch.Tensor)
            after = before.updates + (1.0 - skip if counted else int(not skip))
            metrics["skipped"] = skip
        if before.scale is not None:
            metrics["loss_scale"] = before.scale["scale"].clone()
            owned.move_scale(before.scale, skip, metrics["weight"])
        if owned.engine.end is not None:
            owned.engine.end()
        following = TrainState(
            step=before.step + 1,
            updates=after,
            params=owned.params,
            buffers=owned.current_buffers(),
            opt=owned.opt,
            scale=before.scale,
            ema=owned.ema,
            rng=state.rng,
            data=state.data if position is None else position,
            extras=before.extras,
            transforms=transforms,
        )
        return following, metrics

    def _call(self, state: TrainState, lent: Given | None, notice: Notice | None) -> Call:
        scale = state.scale
        return Call(
            root=None if self._rng == "stream" else state.rng.root,
            step=state.step,
            scale=None if scale is None else scale["scale"],
            last_weight=None if scale is None else scale["weight"],
            given=lent,
            notice=notice,
        )

    def _captured(
        self, owned: Owned, state: TrainState, micros: Sequence[Micro], call: Call
    ) -> tuple[Gradients | None, dict[str, Any], Any]:
        """Run the compiled programs; the gradients, where the update is not among what they do."""
        whole: Any = owned.whole
        updater = owned.updater
        reported, rates = updater.rates(state.updates)
        begun = kernels.begun()
        try:
            found = whole.run(micros, call, updater.as_tensors(rates), updater.number(state.updates))
        except BaseException:
            if kernels.begun() != begun:
                donate(state)
            raise
        if found.grads is None:
            found.metrics.update(reported)
        return found.grads, found.metrics, found.skip

    def _tail(
        self, owned: Owned, state: TrainState, grads: Gradients, metrics: dict[str, Any], transforms: Any
    ) -> Any:
        """What follows the gradients, eagerly; whether the update was skipped."""
        lowered, updates = self._lowered, state.updates
        info = Info(step=state.step, updates=updates, params=owned.params, record=metrics.__setitem__)
        try:
            if lowered.skips:
                grads.skip_where_nonfinite()  # before a transform could clamp an infinity away
            for name, hook in lowered.gradients:
                keep_own(transforms, name, hook.on_gradients(grads, transforms.get(name), info))
        except BaseException:
            owned.engine.clear()  # or the next call would add to these gradients
            raise
        donate(state)
        metrics.update(owned.updater.apply(grads, updates))
        owned.engine.clear()
        if grads.skip is not None:
            info = dataclasses.replace(info, skip=grads.skip)
        for name, hook in lowered.updates:
            keep_own(transforms, name, hook.on_update(owned.engine, transforms.get(name), info))
        return grads.skip


class _Before:
    """What is needed of a state after it was donated."""

    __slots__ = ("extras", "scale", "step", "transforms", "updates")

    def __init__(self, state: TrainState) -> None:
        self.step = state.step
        self.updates = state.updates
        self.scale = state.scale
        self.extras = state.extras
        self.transforms: dict[str, Any] = dict(state.transforms)
