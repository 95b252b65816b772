"""`gradients_at`: gradients at other parameters, or of other losses, in an update, for hooks that ask.

Sharpness-aware minimisation (https://arxiv.org/abs/2010.01412) and finite differences of gradients need them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fnaccel import _torch
from fnaccel.data.micro_batches import MicroBatches
from fnaccel.engine.exchange import Exchange
from fnaccel.engine.gradients import Gradients, differences, part_like
from fnaccel.engine.passes import Inputs, Outcome, Passes
from fnaccel.engine.user_draws import pausing
from fnaccel.errors import CapabilityError, TreeMismatchError
from fnaccel.models.moving_buffers import passes_put_back
from fnaccel.program.instance import Instance
from fnaccel.program.lower import lower
from fnaccel.step.step import Step
from fnaccel.tree import Tree
from fnaccel.world.undo import StreamStates

_WHERE = "info.gradients_at(params)"


def gradients_at(
    instance: Instance,
    micro_batches: MicroBatches,
    inputs: Inputs,
    first: Gradients,
    params: Mapping[str, Tree],
    *,
    loss: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """See `Info.gradients_at`. `first` are the gradients of the update itself, which stay as they are."""
    engine = instance.engine
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
    values = Gradients.with_copies(
        [part_like(params[leaf.name], leaf).detach() for leaf in leaves], [leaf.shard for leaf in leaves]
    )
    # a strategy may use the memory of its gradients again, and the hook holds them
    ours = [grad for grad in first.shards if grad is not None] if first.lent else []
    kept = [grad.clone() for grad in ours]
    held = [leaf.param.grad if first.lent else None for leaf in leaves]
    exchange = Exchange([(x.shard, value) for x, value in zip(leaves, values, strict=True)], copies=True)
    engine.clear()
    try:
        with exchange:
            second = differentiate(instance, micro_batches, inputs, loss).gradients
        assert second is not None  # the passes of gradients leave the update out
        found = second.by_name(kept=True)
        pairs = zip(leaves, first.shards, strict=True)
        absent = [leaf for leaf, grad in pairs if grad is not None and leaf.name not in found]
        return found | {leaf.name: leaf.like(torch.zeros_like(leaf.shard)) for leaf in absent}
    finally:
        exchange.undo()  # once more: an error between its body and its end would skip that
        for leaf, grad in zip(leaves, held, strict=True):
            leaf.param.grad = grad
        if ours:
            _torch.foreach_copy_(ours, kept)


def differentiate(
    instance: Instance, micro_batches: MicroBatches, inputs: Inputs, loss: Any = None
) -> Outcome:
    """Run the passes of an update, or of another loss, aside: only metrics and gradients are left of them."""
    given, compiler, passes_of = inputs.given, instance.lowered.settings.compiler, None
    if loss is not None:
        if compiler is not None and compiler.scope != "block":
            what = f"fa.compile(scope={compiler.scope!r}) compiles the step's loss, and this is another"
            raise CapabilityError(what, where=_WHERE, fix='fa.compile(step, scope="block"), or leave it out')
        step = Step(loss, instance.spec.step.transforms)
        passes_of = functools.partial(Passes, instance.engine, lower(step, part=instance.lowered.part).loss)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pausing())
        stack.enter_context(passes_put_back(instance.engine.layout.modules, StreamStates(inputs.streams)))
        stack.enter_context(torch.enable_grad())
        if given is not None:
            stack.enter_context(given.frozen())
        if instance.meter is not None:
            stack.enter_context(instance.meter.watch(micro_batches))
        totals = instance.totals(micro_batches, None)
        passes = (passes_of or instance.gradient_passes)(micro_batches, totals, inputs)
        instance.engine.forward.drive(len(micro_batches), passes.forward, passes.backward, passes.sync)
        return passes.outcome()
