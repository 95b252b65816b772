"""A whole step as two compiled programs, from the host: inputs, outputs, and the first check.

`step_graph.py` has the code that the programs trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fnaccel import _torch, tree
from fnaccel.collectives import gather_objects
from fnaccel.data.micro_batches import MicroBatch, MicroBatches
from fnaccel.engine.capture import Capture
from fnaccel.engine.combine import AuxValues, check_aux, detached, mixed_kinds, packed, structure, unpacked
from fnaccel.engine.engine import Engine
from fnaccel.engine.gradients import Gradients, apart
from fnaccel.engine.passes import Inputs, Loss, up_front_of, wide_dtype
from fnaccel.engine.totals import Totals
from fnaccel.engine.updater import Updater
from fnaccel.errors import CapabilityError
from fnaccel.optim import kernels
from fnaccel.program.put_back import passes_put_back
from fnaccel.program.step_graph import Added, Finished, Given, StepGraph, filled
from fnaccel.program.tail import Tail
from fnaccel.step.loss import Scalar, check_attached, check_divided, read_loss
from fnaccel.step.settings import Compiler
from fnaccel.tree import Tree
from fnaccel.world.random_streams import generators_of


class Outcome(NamedTuple):
    """The result of a step: its metrics, the gradients if the update is still to be done, else its skip."""

    metrics: dict[str, Any]
    gradients: Gradients | None
    skip: Any


class CapturedStep:
    """The compiled programs of one train step.

    Args:
        engine: the strategy made real.
        capture: how its step can be captured.
        loss: the loss function under its FORWARD transforms.
        settings: how to compile.
        tail: clipping, update and averages. None leaves them to the caller.
        updater: updates the parameters.
        params: the parameters as hooks see them.
    """

    def __init__(
        self,
        engine: Engine,
        capture: Capture,
        loss: Loss,
        settings: Compiler,
        tail: Tail | None,
        updater: Updater,
        params: Tree,
    ) -> None:
        self._engine = engine
        self._capture = capture
        self._loss = loss
        self._tail = tail
        self._group = engine.layout.mesh.group("loss")
        self._replays = settings.mode in ("reduce-overhead", "max-autotune")
        kernels.register()
        self._graph = StepGraph(engine, capture, loss, tail, updater, params)
        self._add = settings.of_step(self._graph.add, capture.graph_pass)
        self._finish = settings.of_step(self._graph.finish, capture.graph_pass)

    def run(
        self,
        micro_batches: MicroBatches,
        totals: Totals,
        inputs: Inputs,
        rates: Sequence[Any],
        number: torch.Tensor,
    ) -> Outcome:
        """One step.

        Args:
            micro_batches: those of this rank.
            totals: the questions that ranks ask each other. Total and weight are summed in the graph.
            inputs: what the step takes from the state.
            rates: 0-d tensors, one for each group of each optimizer.
            number: 0-d tensor, the number of this update.

        Raises:
            CapabilityError: a lent model whose parameters are sharded. In the first call also parameters
                without a gradient under ddp.
        """
        lent_models = () if inputs.given is None else (_whole_models(inputs.given),)
        if self._replays:
            torch.compiler.cudagraph_mark_step_begin()
        engine, device = self._engine, self._engine.layout.mesh.world.device
        *before, last = micro_batches
        hooked = self._tail is not None and (self._tail.gradients or self._tail.updates)
        self._agree(last.data, lent_models)
        up_front = up_front_of(self._loss, micro_batches, inputs, totals, engine)
        up_front = None if up_front is None else filled(up_front, wide_dtype(engine), device)
        known = self._loss.weight_fn is not None
        keeps = [self._keep(part, totals.weight_of(i)) for i, part in enumerate(micro_batches)]
        aux = AuxValues(partial_rows=engine.layout.mesh.partial_rows)
        sums, carried, weighted = self._accumulate(before, lent_models, up_front, aux, keeps, inputs.seed)
        inputs.seed(len(before))
        # filled on the device one by one: a copy from the host would wait for all work before it
        questions = [filled(value, sums.dtype, device) for value in totals.numbers]
        given = Given(
            up_front=up_front,
            carried=carried,
            sums=torch.cat([sums, torch.stack(questions)]) if questions else sums,
            global_weight=packed([totals.weight], device)[0] if known else None,
            scale=inputs.scale,
            rates=rates,
            number=number,
            step=filled(inputs.step, torch.int64, device) if hooked else None,
        )
        out: Finished = self._call(self._finish, last.data, lent_models, keeps[-1], given)
        self._check_kinds({*weighted, out.weighted})
        if self._replays:  # the next replay of a CUDA graph writes to the same memory
            metrics, values, answers, skip = tree.map_tensors(
                torch.clone, (out.metrics, out.aux, out.answers, out.skip)
            )
        else:
            metrics, values, answers, skip = out.metrics, out.aux, out.answers, out.skip
        totals.hear(None if self._group is None else answers)
        aux.take(values, valid=last.valid > 0)
        metrics.update(self._shared(aux, out.weighted))
        if out.grads is None:
            return Outcome(metrics, None, skip)
        leaves, held_by = engine.layout.leaves, engine.layout.held_by
        return Outcome(metrics, Gradients(leaves, apart(out.grads), out.multiplier, held_by, device), None)

    def _check_kinds(self, weighted: set[bool]) -> None:
        if len(weighted) > 1 and self._loss.weight_fn is None:
            raise mixed_kinds("micro-batch")

    def _accumulate(
        self,
        parts: Sequence[MicroBatch],
        lent_models: Tree,
        up_front: Scalar | None,
        aux: AuxValues,
        keeps: Sequence[torch.Tensor],
        seed: Callable[[int], None],
    ) -> tuple[torch.Tensor, list[torch.Tensor | None] | None, set[bool]]:
        """Total and weight, the gradients, and the kinds of loss, of all micro-batches but the last."""
        device = self._engine.layout.mesh.world.device
        sums = torch.zeros(2, dtype=_sum_type(device), device=device)
        if not parts:
            return sums, None, set()
        whole = self._capture.average is None or not self._loss.sync_each
        shards = self._capture.leaves
        grads = self._capture.blank() if whole else [torch.zeros_like(leaf.shard) for leaf in shards]
        used = (False,) * len(grads)
        kinds: set[bool] = set()
        for index, part in enumerate(parts):
            seed(index)
            out: Added = self._call(self._add, part.data, lent_models, keeps[index], up_front, grads, sums)
            sums = out.sums
            kinds.add(out.weighted)
            used = tuple(a or b for a, b in zip(used, out.reached, strict=True))
            aux.take(out.aux, valid=part.valid > 0)
        return sums, [grad if was else None for grad, was in zip(grads, used, strict=True)], kinds

    def _call(self, program: Callable[..., Any], data: Tree, lent_models: Tree, *args: Any) -> Any:
        """Run a compiled program. If it can't be compiled, first check whether the loss itself fails."""
        try:
            return program(data, lent_models, *args)
        except _torch.compile_errors():
            # shards are gathered by all ranks, and other ranks may not have failed
            if not any(leaf.sharded for leaf in self._capture.leaves):
                self._try_eagerly(data, lent_models)
            raise

    def _agree(self, data: Tree, lent_models: Tree) -> None:
        """Before the first step, check that ranks report alike, and find the parameters that any rank uses.

        Raises:
            LossError: ranks return losses of different kinds, or different aux.
            CapabilityError: no rank has a gradient for some parameter, and the strategy needs one.
        """
        if self._group is None or self._graph.used is not None:
            return
        aux, weighted, reached = self._eagerly(data, lent_models)
        values = AuxValues(partial_rows=self._engine.layout.mesh.partial_rows)
        values.take(detached(aux), valid=False)
        self._engine.agreement.check(structure(values, self._kind(weighted)), self._group)
        used = tuple(map(any, zip(*gather_objects(reached, over=self._group), strict=True)))
        if self._capture.complete and not all(used):
            names = [leaf.name for leaf, was in zip(self._capture.leaves, used, strict=True) if not was]
            raise CapabilityError(
                f"{', '.join(names)} got no gradient on any rank",
                where="fa.ddp()",
                fix="freeze them, fa.train_step(frozen=...); or fa.ddp(unused_parameters=True), for which "
                "fa.compile takes the loss only",
            )
        self._graph.used = used

    def _try_eagerly(self, data: Tree, lent_models: Tree) -> None:
        """Raise the error that the loss function raises without compilation."""
        try:
            self._eagerly(data, lent_models)
        except Exception as error:
            raise error from None  # torch's own account of the error is longer and less clear

    def _kind(self, weighted: bool) -> bool | None:
        return weighted if self._loss.weight_fn is None else None

    def _eagerly(self, data: Tree, lent_models: Tree) -> tuple[Any, bool, list[bool]]:
        """Aux, whether the loss is weighted, and which parameters get a gradient, without compilation.

        Leaves nothing behind.
        """
        layout = self._engine.layout
        with passes_put_back(layout.modules, generators_of(layout.mesh.world.device)):
            params, run = self._capture.open()
            parts = read_loss(run(self._loss.fn, data, *lent_models), self._loss.where)
            check_attached(parts.total, self._loss.where)
            if self._loss.weight_fn is None:
                check_divided(parts, self._loss.where)
            check_aux(parts.aux)
            grads: Any = torch.autograd.grad(parts.total, params, allow_unused=True)
            self._graph.check_reached(grads)
            return parts.aux, parts.weighted, [grad is not None for grad in grads]

    def _keep(self, part: MicroBatch, weight: Scalar) -> torch.Tensor:
        """1, or 0 for a filler or a weight of 0: a tensor, since a number would be compiled in."""
        return filled(weight > 0 if part.valid else 0, torch.float32, self._engine.layout.mesh.world.device)

    def _shared(self, aux: AuxValues, weighted: bool) -> dict[str, Any]:
        """The aux of all ranks, in an all-reduce of its own if there is any."""
        device = self._engine.layout.mesh.world.device
        if self._group is not None:
            self._engine.agreement.check(structure(aux, self._kind(weighted)), self._group)
            if aux.values:
                vector = packed(aux.values, device)
                dist.all_reduce(vector, group=self._group)
                aux.put(unpacked(vector, aux.shapes))
        return aux.finish(self._group, device)


def _whole_models(lent_models: Tree) -> Any:
    if any(
        hasattr(p, "placements") for engine in lent_models.engines for p in engine.layout.parameters.values()
    ):
        raise CapabilityError(
            "a sharded model is lent to a step that is captured as one graph",
            where="train_step(state, batch, given=...)",
            fix="lend a model under local() or ddp(); or fa.compile(step, scope='block') (scope 'loss' if "
            "the borrower is not sharded)",
        )
    return lent_models.models


def _sum_type(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
