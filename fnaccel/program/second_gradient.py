"""`SecondGradient`: gradients at other parameters, inside of an update, for hooks that ask for them.

Sharpness-aware minimisation (https://arxiv.org/abs/2010.01412) and finite differences of gradients need them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from fnaccel import _torch
from fnaccel.data.micro_batches import MicroBatches
from fnaccel.engine.exchange import Exchange
from fnaccel.engine.gradients import Gradients, differences, part_like, with_copies
from fnaccel.engine.passes import Inputs, Outcome
from fnaccel.engine.user_draws import pausing
from fnaccel.errors import CapabilityError, TreeMismatchError
from fnaccel.models.moving_buffers import passes_put_back
from fnaccel.program.instance import Instance
from fnaccel.tree import Tree

_WHERE = "info.gradients_at(params)"


class SecondGradient:
    """`info.gradients_at(params)` in the hooks of one update.

    Args:
        instance: the model.
        micro_batches, inputs: of the update.
        first: the gradients of the update itself, which stay as they are.
    """

    def __init__(
        self,
        instance: Instance,
        micro_batches: MicroBatches,
        inputs: Inputs,
        first: Gradients,
    ) -> None:
        self._instance = instance
        self._micro_batches = micro_batches
        self._inputs = inputs
        self._first = first

    def at(self, params: Mapping[str, Tree]) -> dict[str, Any]:
        """Gradients by name, at values by name: see `Info.gradients_at`."""
        engine, first = self._instance.engine, self._first
        leaves = engine.layout.leaves
        if engine.runtime.bound is not None:
            raise CapabilityError(
                f"{engine.name} can't compute a second gradient in an update",
                where=_WHERE,
                fix='fa.Transform(..., needs="second gradient") says so in the plan; or local, ddp or fsdp',
            )
        trained = {leaf.name: leaf.shown for leaf in leaves}
        if isinstance(params, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - the user's
            frozen = engine.layout.parameters.keys() - trained
            params = {name: value for name, value in params.items() if name not in frozen}
        problems = differences(params, trained, "parameters")
        if problems:
            raise TreeMismatchError(
                f"the parameters differ from those that are trained: {'; '.join(problems)}",
                where=_WHERE,
                fix="give a value for each trained parameter, by its name and in its shape",
            )
        # the parameters are about to change, and a value may share memory with one
        values = with_copies(
            [part_like(params[leaf.name], leaf).detach() for leaf in leaves], [leaf.shard for leaf in leaves]
        )
        # a strategy may use the memory of its gradients again, and the hook holds them
        ours = [grad for grad in first.shards if grad is not None] if first.lent else []
        kept = [grad.clone() for grad in ours]
        held = [leaf.param.grad if first.lent else None for leaf in leaves]
        engine.clear()
        try:
            pairs = [(leaf.shard, value) for leaf, value in zip(leaves, values, strict=True)]
            with Exchange(pairs, copies=True):
                second = differentiate(self._instance, self._micro_batches, self._inputs).gradients
            assert second is not None  # the passes of gradients leave the update out
            return second.by_name(kept=True)
        finally:
            for leaf, grad in zip(leaves, held, strict=True):
                leaf.param.grad = grad
            if ours:
                _torch.foreach_copy_(ours, kept)


def differentiate(instance: Instance, micro_batches: MicroBatches, inputs: Inputs) -> Outcome:
    """Run the passes of an update aside: nothing is left of them but metrics and gradients."""
    given = inputs.given
    with contextlib.ExitStack() as stack:
        stack.enter_context(pausing())
        stack.enter_context(passes_put_back(instance.engine.layout.modules, inputs.streams))
        stack.enter_context(torch.enable_grad())
        if given is not None:
            stack.enter_context(given.frozen())
        if instance.meter is not None:
            stack.enter_context(instance.meter.watch(micro_batches))
        totals = instance.totals(micro_batches, None)
        passes = instance.gradient_passes(micro_batches, totals, inputs)
        instance.engine.forward.drive(len(micro_batches), passes.forward, passes.backward, passes.sync)
        return passes.outcome()
