"""One update of a live state, from its batch to the next state. Read it from top to bottom."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from fnaccel.data.micro_batches import MicroBatches
from fnaccel.engine.left_out import LeftOut
from fnaccel.program.instance import Instance
from fnaccel.program.lent_models import LentModels, lend
from fnaccel.program.second_gradient import gradients_at
from fnaccel.program.state_owner import StateOwner
from fnaccel.program.update_guard import UpdateGuard
from fnaccel.state import TrainState, lease, scale_of, state_of
from fnaccel.step.checked_metrics import checked
from fnaccel.step.loss import is_uncounted
from fnaccel.step.step import Info
from fnaccel.tree import Tree
from fnaccel.world.progress_marks import enter

_NOTHING = contextlib.nullcontext()


def update(
    owner: StateOwner,
    check_first: Callable[[Tree, LentModels | None], None],
    state: TrainState,
    batch: Tree,
    *,
    given: Mapping[str, Any] | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """`TrainStep.__call__` below its CALL transforms: the next state, leased, and metrics.

    A failure before the first change of a parameter leaves the state live and exact: see `UpdateGuard`.

    Args:
        owner: of the state.
        check_first: compares a cut model with the whole one, before the first update.
        state, batch, given: of the call.
    """
    # Whether the call may go on: the state is live, the model is as it was built, the batch can be cut.
    instance, micro_batches, lent = begin(owner, check_first, state, batch, given)
    position = state.data if micro_batches.batch is None else micro_batches.batch.position

    # What is read of the state, which `commit` donates.
    step, updates, extras, scale = state.step, state.updates, state.extras, scale_of(state)
    transforms = dict(state.transforms)
    engine, updater, tail = instance.engine, instance.updater, instance.lowered.tail
    with micro_batches.around, UpdateGuard(instance, state, micro_batches) as guard:
        reported, rates = updater.rates(updates)  # a schedule of the user's may raise

        # Forward and backward of each micro-batch, the totals of all ranks, and what ranks ask each other.
        totals = instance.totals(micro_batches, owner.notice)
        inputs = instance.inputs(state, rates, lent)
        frozen = _NOTHING if lent is None else lent.frozen()
        compiling = _NOTHING if instance.meter is None else instance.meter.watch(micro_batches)
        with frozen, compiling:
            passes = instance.passes(micro_batches, totals, inputs)
            engine.forward.drive(len(micro_batches), passes.forward, passes.backward, passes.sync)
            metrics, weight, gradients, skipped_in_graph = passes.outcome()

        # Hooks of GRADS, the optimizers, hooks of UPDATE.
        enter("update")
        left_out = LeftOut(is_uncounted(weight), skipped_in_graph, weight)
        if left_out.uncounted is True or gradients is None:  # nothing to do, or a captured step has done it
            guard.commit()
            metrics.update(reported)
            if left_out.uncounted is True:
                engine.drop_pass()
        else:
            updater.drop_waiting(gradients.shards, updates, warns=owner.mesh.world.rank == 0)
            gradients.uncounted = left_out.uncounted if isinstance(left_out.uncounted, torch.Tensor) else None

            def apply() -> None:
                guard.commit()  # the state is dead from here on
                updater.update(gradients, rates, updater.number(updates))
                metrics.update(reported if engine.runtime.bound is None else updater.of_runtime(reported))
                engine.clear()

            info = Info(
                step=step,
                updates=updates,
                params=instance.by_name,
                metrics=metrics,
                gradients_at=functools.partial(gradients_at, instance, micro_batches, inputs, gradients),
            )
            drawing = functools.partial(instance.drawing, state.rng.root, step)
            if instance.no_user_hooks:
                drawing = contextlib.nullcontext  # the hooks of the library draw nothing
            skipped = tail.run(engine, gradients, transforms, info, apply, drawing)
            left_out = attrs.evolve(left_out, skip=skipped)
            if tail.skips and tail.users:
                guard.check_own()

        # The next state.
        updates = instance.complete(step, updates, scale, left_out, metrics, transforms)
        next_state = state_of(
            instance.trees(scale),
            step=step + 1,
            updates=updates,
            rng=state.rng,
            data=position,
            extras=extras,
            transforms=transforms,
        )
        lease(next_state, owner.lease)
        instance.learned.moved = True
    return next_state, checked(metrics, left_out.uncounted)


def begin(
    owner: StateOwner,
    check_first: Callable[[Tree, LentModels | None], None],
    state: TrainState,
    batch: Tree,
    given: Mapping[str, Any] | None,
) -> tuple[Instance, MicroBatches, LentModels | None]:
    """What updates the state, the micro-batches of this rank, and what is lent, of the call's arguments."""
    instance = owner.instance_of(state)
    micro_batches = instance.begin(state, batch)
    lent = None if given is None else lend(given, owner, state.updates)
    if state.step == 0:
        check_first(micro_batches[0].data, lent)
    if instance.lowered.part is not None:  # several ranks compute parts of each row
        micro_batches = instance.lowered.parts_of(micro_batches)
    return instance, micro_batches, lent
