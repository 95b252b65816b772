"""The functions that a captured step traces: forward, backward, averaging, hooks and update as one graph.

Two of them serve any number of micro-batches. `add` adds the gradients of a micro-batch to those before it,
and `finish` takes the last micro-batch and does all the rest. With one micro-batch only `finish` runs.
Only tensors and trees of them cross the border of a graph. `captured_step.py` is the host's side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import torch

from fnaccel import _torch
from fnaccel.engine.aux_values import check_aux, detached, divide
from fnaccel.engine.gradients import added, laid_out
from fnaccel.engine.passes import Loss, multiplier_of
from fnaccel.engine.updater import Updater
from fnaccel.extend import Capture, Engine, Gradients, Info
from fnaccel.program.tail import Tail
from fnaccel.step.loss import Scalar, check_attached, check_reached, is_uncounted, masked, read_loss
from fnaccel.tree import Tree

KEPT = "the loss used parameters that fa.params gave in an earlier call"
LATE = "a parameter that no rank used in the first update gets a gradient"


class FinishInputs(NamedTuple):
    """What the last program takes beside its micro-batch. Each field is a tensor, a tree of tensors, or None.

    Attributes:
        up_front: the factor of totals before backward.
        carried: the gradients of the micro-batches before, each None if it got none. None without any.
        sums: total and weight so far, and the numbers of the questions, which ranks sum.
        global_weight: the weight of all ranks if it was known before.
        scale: the loss scale of fp16.
        rates: the learning rates.
        number: the number of this update.
        step: the number of this call, if a hook asks for it.
    """

    up_front: torch.Tensor | None
    carried: Sequence[torch.Tensor | None] | None
    sums: torch.Tensor
    global_weight: torch.Tensor | None
    scale: torch.Tensor | None
    rates: Tree
    number: torch.Tensor
    step: torch.Tensor | None


class Added(NamedTuple):
    """What a program of a micro-batch that is not the last returns."""

    sums: torch.Tensor
    reached: tuple[bool, ...]
    aux: Any
    weighted: bool


class Finished(NamedTuple):
    """What the last program returns.

    Attributes:
        metrics: `loss`, `weight`, and those of hooks.
        aux: of its micro-batch.
        answers: the sums of the questions.
        skip: 1 if the update was left out. None if the update is left to the caller, or never left out.
        weighted: whether the loss is an `fa.Mean`.
        reached: whether each parameter got a gradient.
        grads, multiplier: the gradients, if the update is left to the caller.
    """

    metrics: dict[str, Any]
    aux: Any
    answers: torch.Tensor
    skip: torch.Tensor | None
    weighted: bool
    reached: tuple[bool, ...]
    grads: list[torch.Tensor | None] | None
    multiplier: Any


class StepGraph:
    """The traced part of one train step.

    Args:
        engine: the strategy made real.
        capture: how its step can be captured.
        loss: the loss function under its FORWARD transforms.
        tail: clipping, update and averages. None leaves them to the caller.
        updater: updates the parameters.
        params: the parameters as hooks see them.

    Attributes:
        used: which parameters any rank has a gradient for. None until the ranks have compared.
        reaches: whether the loss of this rank reached some then.
    """

    def __init__(
        self, engine: Engine, capture: Capture, loss: Loss, tail: Tail | None, updater: Updater, params: Tree
    ) -> None:
        self.used: tuple[bool, ...] | None = None
        self.reaches = False
        self._engine = engine
        self._capture = capture
        self._loss = loss
        self._tail = tail
        self._updater = updater
        self._params = params
        # hooks find the very tensors that the graph changes
        self._traced = attrs.evolve(engine, layout=attrs.evolve(engine.layout, leaves=capture.leaves))
        self._group = engine.layout.mesh.group("loss")
        self._held_by = engine.layout.held_by  # read here, since a cached property can't be traced

    def add(
        self,
        data: Tree,
        lent_models: Tree,
        info: Tree,
        keep: torch.Tensor,
        up_front: Scalar | None,
        carried: list[torch.Tensor],
        sums: torch.Tensor,
    ) -> Added:
        """One micro-batch that is not the last. Adds its gradients to `carried`.

        Args:
            data: its batch.
            lent_models: the models of other train steps, in a tuple, or an empty tuple.
            info: of the micro-batch, in tensors, if the loss function takes it.
            keep: 1, or 0 for a filler or a weight of 0.
            up_front: the factor of totals before backward, or None.
            carried: the gradients so far.
            sums: total and weight so far, float64.
        """
        total, sums, aux, weighted, params = self._forward(data, lent_models, info, keep, sums)
        grads = self._backward(total, params, keep, up_front, average=self._loss.sync_each)
        for total_grad, grad in zip(carried, grads, strict=True):
            if grad is not None:
                total_grad.add_(grad)
        return Added(sums, tuple(grad is not None for grad in grads), aux, weighted)

    def finish(
        self,
        data: Tree,
        lent_models: Tree,
        info: Tree,
        keep: torch.Tensor,
        given: FinishInputs,
    ) -> Finished:
        """The last micro-batch, and all that follows.

        Args:
            data, lent_models, info, keep: as for `add`.
            given: the rest.
        """
        total, sums, aux, weighted, params = self._forward(data, lent_models, info, keep, given.sums)
        if self._group is not None:
            # begun here and waited for below, so that it runs beside the backward pass
            sums = _torch.begin_all_reduce(sums, self._group)
        grads = self._backward(total, params, keep, given.up_front, average=self._loss.sync_each)
        if given.carried is not None:
            grads = [added(earlier, grad) for earlier, grad in zip(given.carried, grads, strict=True)]
        self.check_reached(grads)
        if not self._loss.sync_each:
            grads = self._average(grads, params)
        # fused kernels pair elements by their place in memory, so a gradient gets its parameter's strides
        pairs = zip(grads, self._capture.leaves, strict=True)
        grads = [None if grad is None else laid_out(grad, leaf.shard) for grad, leaf in pairs]
        if self._group is not None:
            sums = _torch.end_collective(sums)
        weight = sums[1] if given.global_weight is None else given.global_weight
        after = None if given.global_weight is None else 1.0
        multiplier = multiplier_of(self._engine, weight, given.scale, given.up_front, after)
        dtype = torch.promote_types(total.dtype, torch.float32)
        loss = divide(sums[0], weight, sums.device).to(dtype)
        # cloned, since a tensor that is returned twice is one output of a graph
        metrics: dict[str, Any] = {"loss": loss, "weight": weight.clone()}
        reached = tuple(grad is not None for grad in grads)
        if self._tail is None:
            return Finished(metrics, aux, sums[2:], None, weighted, reached, grads, multiplier)
        skip = self._end(self._tail, grads, multiplier, metrics, given)
        return Finished(metrics, aux, sums[2:], skip, weighted, reached, None, None)

    def check_reached(self, grads: Sequence[Any]) -> None:
        """Raise LossError if no parameter got a gradient, unless another rank may have some."""
        if self._group is None and self._held_by is None:
            check_reached(grads, self._loss.where)

    def _forward(
        self,
        data: Tree,
        lent_models: Tree,
        info: Tree,
        keep: torch.Tensor,
        sums: torch.Tensor,
    ) -> Any:
        params, run = self._capture.open()
        informed = self._loss.informed
        if informed is not None:
            informed.info = info
        total, weight, aux, weighted, _ = read_loss(run(self._loss.fn, data, *lent_models), self._loss.where)
        if informed is not None:
            informed.info = None  # what is left here at the end would be an output of the graph
        check_attached(total, self._loss.where)
        check_aux(aux)
        if self._loss.weight_fn is None:
            total, weight = masked(total, weight)
        counted = torch.stack([filled(value, sums.dtype, sums.device) for value in (total, weight)])
        # `where` and no product: 0 times an infinity of a filler would be NaN
        counted = torch.where(keep > 0, counted, torch.zeros_like(counted))
        if sums.numel() > 2:  # only `finish` has the others, and a forward does not change them
            counted = torch.cat([counted, torch.zeros_like(sums[2:])])
        return total, sums + counted, detached(aux), weighted, params

    def _backward(
        self,
        total: torch.Tensor,
        params: list[torch.Tensor],
        keep: torch.Tensor,
        up_front: Scalar | None,
        *,
        average: bool,
    ) -> Any:
        total = total * keep
        if up_front is not None:
            total = total * up_front
        grads = list(torch.autograd.grad(total, params, allow_unused=True))
        return self._average(grads, params) if average else grads

    def _average(self, grads: Sequence[torch.Tensor | None], params: list[torch.Tensor]) -> Any:
        average = self._capture.average
        if average is None:
            return grads
        # every rank sends every gradient, zeros if it has none: other ranks may have one
        pairs = zip(grads, params, strict=True)
        averaged = average([torch.zeros_like(param) if grad is None else grad for grad, param in pairs])
        reached = tuple(grad is not None for grad in grads)
        used = reached if self.used is None else self.used
        if self.reaches and not any(reached):
            _torch.end_trace(KEPT)  # `CapturedStep.call` finds the reason in torch's error
        if any(now and not then for now, then in zip(reached, used, strict=True)):
            _torch.end_trace(LATE)
        return [grad if was else None for grad, was in zip(averaged, used, strict=True)]

    def _end(
        self,
        tail: Tail,
        grads: Sequence[torch.Tensor | None],
        multiplier: Scalar | None,
        metrics: dict[str, Any],
        given: FinishInputs,
    ) -> Any:
        """Clip, finite check, update, averages. Returns whether the update was skipped."""
        engine = self._traced

        with torch.no_grad():
            layout = engine.layout
            device = layout.mesh.world.device
            gradients = Gradients(layout.leaves, list(grads), multiplier, self._held_by, device)
            gradients.uncounted = filled(is_uncounted(metrics["weight"]), torch.float32, device)
            info = Info(
                step=0 if given.step is None else given.step,
                updates=given.number - 1,
                params=self._params,
                metrics=metrics,
            )

            def apply() -> None:
                self._updater.update(gradients, given.rates, given.number)
                metrics.update(self._updater.ema_decay(given.rates))

            return tail.run(engine, gradients, {}, info, apply)


def filled(value: Scalar, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A 0-d tensor, filled on the device: a copy of a host value would wait for all work before it."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(dtype)
    return torch.full((), value, dtype=dtype, device=device)
