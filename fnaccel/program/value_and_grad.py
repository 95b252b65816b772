"""`gradient`: metrics and gradients of a live state, as its next update would have them. Nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fnaccel.engine.gradients import Gradients
from fnaccel.errors import CapabilityError
from fnaccel.program.instance import Instance
from fnaccel.program.lent_models import LentModels
from fnaccel.program.second_gradient import differentiate
from fnaccel.program.state_owner import StateOwner
from fnaccel.program.update import begin
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
    given: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """See `fa.value_and_grad`. The arguments are those of `update`."""
    engine = owner.instance_of(state).engine
    if engine.runtime.bound is not None:
        raise CapabilityError(
            f"{engine.name} keeps gradients to itself",
            where=GRADIENT,
            fix="fa.local(), fa.ddp(), fa.fsdp() or fa.tensor() for this program",
        )
    instance, micro_batches, lent = begin(owner, check_first, state, batch, given)
    with micro_batches.around, UpdateGuard(instance, state, micro_batches):
        _, rates = instance.updater.rates(state.updates)
        outcome = differentiate(instance, micro_batches, instance.inputs(state, rates, lent))
        assert outcome.gradients is not None
        grads = _shown(instance, outcome.gradients)
        engine.clear()
    return checked(outcome.metrics, None), grads


def _shown(instance: Instance, gradients: Gradients) -> dict[str, Any]:
    """Gradients laid out as `state.params` shows the trained parameters. Zeros for one without a gradient."""
    gradients.materialise()
    flat = {
        leaf.name: leaf.like(torch.zeros_like(leaf.shard) if grad is None else grad.clone())
        for leaf, grad in zip(instance.engine.layout.leaves, gradients.shards, strict=True)
    }
    return instance.by_model(flat)
