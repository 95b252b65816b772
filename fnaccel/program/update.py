"""One update of a live state, from its batch to the next state. Read it from top to bottom."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fnaccel import tree
from fnaccel.engine.passes import Passes
from fnaccel.program.lent_models import Given, lend
from fnaccel.program.second_gradient import SecondGradient
from fnaccel.program.state_owner import StateOwner
from fnaccel.program.undo import Undo
from fnaccel.state import TrainState, lease, scale_of, state_of
from fnaccel.step.checked_metrics import checked
from fnaccel.step.loss import Scalar, idle
from fnaccel.step.step import Info
from fnaccel.tree import Tree
from fnaccel.world.progress_marks import enter

_NOTHING = contextlib.nullcontext()


def update(
    owner: StateOwner,
    check_first: Callable[[Tree, Given | None], None],
    state: TrainState,
    batch: Tree,
    *,
    given: Mapping[str, TrainState] | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """`TrainStep.__call__` below its CALL transforms: the next state, leased, and metrics.

    A failure before the first change of a parameter leaves the state live and exact: see `Undo`.

    Args:
        owner: of the state.
        check_first: compares parts with the whole, and totals with their weights, before the first update.
        state, batch, given: of the call.
    """
    # Whether the call may go on: the state is live, the model is as it was built, the batch can be cut.
    instance = owner.instance_of(state)
    micro_batches = instance.begin(state, batch)
    lent = None if given is None else lend(given, owner)
    if state.step == 0:
        check_first(micro_batches[0].data, lent)
    if instance.lowered.part is not None:  # several ranks compute parts of each row
        micro_batches = instance.lowered.parts_of(micro_batches)
    position = state.data if micro_batches.batch is None else micro_batches.batch.position

    # What is read of the state, which `commit` donates.
    step, updates, extras, scale = state.step, state.updates, state.extras, scale_of(state)
    own = dict(state.transforms)
    engine, updater, tail = instance.engine, instance.updater, instance.lowered.tail
    with micro_batches.around, Undo(instance, state) as undo:
        reported, rates = updater.rates(updates)  # a schedule of the user's may raise

        # Forward and backward of each micro-batch, and the totals of all ranks.
        totals = instance.totals(micro_batches, owner.notice)
        inputs = instance.inputs(state, lent)
        frozen = _NOTHING if lent is None else lent.frozen()
        compiling = _NOTHING if instance.meter is None else instance.meter.watch(micro_batches)
        with frozen, compiling:
            if instance.captured is None:
                passes = Passes(engine, instance.lowered.loss, micro_batches, totals, inputs)
                engine.forward.drive(len(micro_batches), passes.forward, passes.backward, passes.sync)
                gradients, skip = passes.gradients(), None
                metrics = totals.finish()
            else:  # as one program, with the update if no hook is the user's
                enter("captured step")
                metrics, gradients, skip = instance.captured.run(
                    micro_batches, totals, inputs, updater.as_tensors(rates), updater.number(updates)
                )

        # Hooks of GRADS, the optimizers, hooks of UPDATE.
        enter("update")
        left_out = idle(metrics["weight"])
        if gradients is not None and left_out is not True:
            if updater.starts_later:
                updater.hold(gradients)
            gradients.idle = left_out if isinstance(left_out, torch.Tensor) else None

            def apply() -> None:
                undo.commit()
                metrics.update(updater.apply(gradients, rates, updates, reported))
                engine.clear()

            info = Info(
                step=step,
                updates=updates,
                params=instance.params,
                record=functools.partial(_record, metrics),
                metrics=metrics,
                gradients_at=lambda params: SecondGradient(
                    instance, micro_batches, inputs, rates, updates, gradients
                ).at(params),
            )
            draws = functools.partial(instance.drawing, state)
            skip = tail.run(engine, gradients, own, info, apply, draws, undo.check_own)
        else:
            undo.commit()
            metrics.update(reported)
            if left_out is True:
                engine.undo()

        # The next state.
        instance.complete(step, scale, skip, left_out, metrics, own)
        following = state_of(
            instance.trees(scale),
            step=step + 1,
            updates=_counted(updates, left_out, skip),
            rng=state.rng,
            data=position,
            extras=extras,
            transforms=own,
        )
        lease(following, owner.lease)
        instance.moved = True
    return following, checked(metrics, left_out)


def _record(metrics: dict[str, Any], name: str, value: Tree) -> None:
    """Put a hook's value into the metrics. Ranks hold parts of sharded values."""
    metrics[name] = value if type(value) in _WHOLE else tree.map(tree.whole, value)


_WHOLE = (torch.Tensor, float, int)


def _counted(updates: Scalar, left_out: Scalar | None, skip: Scalar | None) -> Any:
    """The number of updates after a step: a tensor if the device decides whether one is left out."""
    if left_out is True:
        return updates
    if skip is None:
        return updates + 1
    return updates + (1.0 - skip if isinstance(updates, torch.Tensor) else int(not skip))
