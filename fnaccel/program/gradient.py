"""`gradient`: metrics and gradients of a live state, as its next update would have them. Nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fnaccel.engine.gradients import Gradients
from fnaccel.errors import CapabilityError
from fnaccel.program.instance import Instance
from fnaccel.program.lent_models import LentModels, lend
from fnaccel.program.second_gradient import differentiate
from fnaccel.program.state_owner import StateOwner
from fnaccel.program.update_guard import UpdateGuard
from fnaccel.state import TrainState
from fnaccel.step.checked_metrics import checked
from fnaccel.tree import Tree

GRADIENT = "fa.value_and_grad(train_step)(state, batch)"


def gradient(
    owner: StateOwner,
    check_first: Callable[[Tree, LentModels | None], None],
    state: TrainState,
    batch: Tree,
    *,
    given: Mapping[str, TrainState] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """See `fa.value_and_grad`. The arguments are those of `update`."""
    instance = owner.instance_of(state)
    if instance.engine.runtime.bound is not None:
        raise CapabilityError(
            f"{instance.engine.name} keeps gradients to itself",
            where=GRADIENT,
            fix="fa.local(), fa.ddp(), fa.fsdp() or fa.tensor() for this program",
        )
    micro_batches = instance.begin(state, batch)
    lent = None if given is None else lend(given, owner)
    if state.step == 0:
        check_first(micro_batches[0].data, lent)
    if instance.lowered.part is not None:
        micro_batches = instance.lowered.parts_of(micro_batches)
    with micro_batches.around, UpdateGuard(instance, state, micro_batches):
        _, rates = instance.updater.rates(state.updates)
        outcome = differentiate(instance, micro_batches, instance.inputs(state, rates, lent))
        assert outcome.gradients is not None
        grads = _shown(instance, outcome.gradients)
        instance.engine.clear()
    return checked(outcome.metrics, None), grads


def _shown(instance: Instance, gradients: Gradients) -> dict[str, Any]:
    """Gradients laid out as `state.params` shows the trained parameters. Zeros for one without a gradient."""
    gradients.materialise()
    flat = {
        leaf.name: leaf.like(torch.zeros_like(leaf.shard) if grad is None else grad.clone())
        for leaf, grad in zip(instance.engine.layout.leaves, gradients.shards, strict=True)
    }
    return instance.by_model(flat)
