"""A whole step as two compiled programs, from the host: inputs, outputs, and the first check.

`step_graph.py` has the code that the programs trace.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fnaccel import _torch, tree
from fnaccel.collectives import gather_objects
from fnaccel.engine.aux_values import AuxValues, check_aux, detached, mixed_kinds, packed, structure, unpacked
from fnaccel.engine.engine import Sync
from fnaccel.engine.gradients import apart
from fnaccel.engine.passes import Divisor, Inputs, Loss, Outcome, out_of_turn, wide_dtype
from fnaccel.engine.totals import Totals
from fnaccel.engine.updater import Updater
from fnaccel.errors import CapabilityError
from fnaccel.extend import Capture, Engine, Gradients, MicroBatches, enter
from fnaccel.models.moving_buffers import passes_put_back
from fnaccel.models.parameter_values import kept_values
from fnaccel.optim import kernels
from fnaccel.program.step_graph import KEPT, LATE, Finished, FinishInputs, StepGraph, filled
from fnaccel.program.tail import Tail
from fnaccel.step.loss import check_attached, check_reached, read_loss
from fnaccel.step.settings import Compiler
from fnaccel.texts import first_of
from fnaccel.tree import Tree
from fnaccel.world.undo import StreamStates


class CapturedStep:
    """The compiled programs of one train step.

    Args:
        engine, capture, loss, tail, updater, params: as for `StepGraph`.
        settings: how to compile.

    Attributes:
        engine, loss, updater, group: of the step.
        runs_hooks: whether the program runs hooks of the step, which ask for the number of the call.
        add, finish: the compiled programs of `StepGraph`.
        blank: gradients of zero, to which `add` adds.
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
        self.engine = engine
        self.updater = updater
        self._capture = capture
        self.loss = loss
        self.runs_hooks = tail is not None and bool(tail.gradients or tail.updates)
        self.group = engine.layout.mesh.group("loss")
        kernels.register()
        if engine.layout.mesh.world.device.type == "cuda":
            _torch.mend_foreach_fusion()
        self._graph = StepGraph(engine, capture, loss, tail, updater, params)
        self._settings = settings
        self._compile(capture.graph_pass)
        self.blank = capture.blank
        if capture.average is not None and loss.sync_each:
            self.blank = lambda: [torch.zeros_like(leaf.shard) for leaf in capture.leaves]

    def _compile(self, graph_pass: Any) -> None:
        self.add = self._settings.of_step(self._graph.add, graph_pass)
        self.finish = self._settings.of_step(self._graph.finish, graph_pass)

    def call(
        self,
        program: Callable[..., Any],
        data: Tree,
        lent_models: Tree,
        info: Tree,
        *args: Any,
    ) -> Any:
        """Run a compiled program. If it can't be compiled, first check whether the loss itself fails."""
        try:
            return program(data, lent_models, info, *args)
        except _torch.compile_errors() as error:
            if LATE in str(error):
                pairs = zip(self._capture.leaves, self._graph.used or (), strict=True)
                raise CapabilityError(
                    f"{LATE}: one of {first_of(leaf.name for leaf, used in pairs if not used)}",
                    where="fa.compile",
                    fix="fa.compile(step, scope='block'), where each update may use others; or use all "
                    "parameters that are trained in the first update",
                ) from error
            if KEPT in str(error):
                raise kept_values(KEPT) from error
            # shards are gathered by all ranks, and other ranks may not have failed
            if not any(leaf.sharded for leaf in self._capture.leaves):
                self._try_eagerly(data, lent_models, info)
            raise

    def agree(self, data: Tree, lent_models: Tree, info: Tree, rows: Sequence[int]) -> None:
        """Before the first step, check that ranks report alike, and find the parameters that any rank uses.

        Raises:
            LossError: ranks return losses of different kinds, or different aux.
            CapabilityError: no rank has a gradient for some parameter, and the strategy needs one.
        """
        if self.group is None or self._graph.used is not None:
            return
        aux, weighted, reached = self._eagerly(data, lent_models, info)
        values = AuxValues(partial_rows=self.engine.layout.mesh.partial_rows)
        values.take(detached(aux), valid=False)
        self.engine.agreement.check(structure(values, self.kind(weighted)), self.group, rows)
        by_rank = gather_objects(reached, over=self.group)
        if any(reached != other for other in by_rank):
            self._compile(None)  # the pass would move collectives to other places on each rank
        used = tuple(map(any, zip(*by_rank, strict=True)))
        check_reached([was or None for was in used], self.loss.where)
        self._graph.reaches = any(reached)
        if self._capture.complete and not all(used):
            names = [leaf.name for leaf, was in zip(self._capture.leaves, used, strict=True) if not was]
            raise CapabilityError(
                f"{', '.join(names)} got no gradient on any rank",
                where="fa.ddp()",
                fix="freeze them, fa.train_step(frozen=...); or fa.ddp(unused_parameters=True), for which "
                "fa.compile takes the loss only",
            )
        self._graph.used = used

    def _try_eagerly(self, data: Tree, lent_models: Tree, info: Tree) -> None:
        """Raise the error that the loss function raises without compilation."""
        try:
            self._eagerly(data, lent_models, info)
        except Exception as error:
            raise error from None  # torch's own account of the error is longer and less clear

    def kind(self, weighted: bool) -> bool | None:
        """Whether losses are an `fa.Mean`. None if the weight comes from the batch, whatever they are."""
        return weighted if self.loss.weight_fn is None else None

    def _eagerly(self, data: Tree, lent_models: Tree, info: Tree) -> tuple[Any, bool, list[bool]]:
        """Aux, whether the loss is weighted, and which parameters get a gradient, without compilation.

        Leaves nothing behind.
        """
        layout = self.engine.layout
        with passes_put_back(layout.modules, StreamStates.of(layout.mesh.world.device)):
            params, run = self._capture.open()
            if self.loss.informed is not None:
                self.loss.informed.info = info
            parts = read_loss(run(self.loss.fn, data, *lent_models), self.loss.where)
            check_attached(parts.total, self.loss.where)
            if self.loss.weight_fn is None:
                self.loss.check.take(parts, self.loss.where)
            check_aux(parts.aux)
            grads: Any = torch.autograd.grad(parts.total, params, allow_unused=True)
            self._graph.check_reached(grads)
            return parts.aux, parts.weighted, [grad is not None for grad in grads]


class CapturedPasses:
    """The passes of one update as compiled programs: one runs a micro-batch forward and backward.

    The last one's program also averages the gradients, and does the update if no hook is the user's.

    Args:
        step: the programs.
        micro_batches: those of this rank.
        totals: the questions that ranks ask each other. Total and weight are summed in the programs.
        inputs: what the step takes from the state.

    Attributes:
        sync: the context of a micro-batch, as `drive` takes it.

    Raises:
        CapabilityError: a lent model whose parameters are sharded. In the first update also parameters
            without a gradient under ddp.
    """

    def __init__(
        self, step: CapturedStep, micro_batches: MicroBatches, totals: Totals, inputs: Inputs
    ) -> None:
        self.sync: Sync = contextlib.nullcontext
        self._step = step
        self._micro_batches = micro_batches
        self._totals = totals
        self._inputs = inputs
        enter("captured step", len(micro_batches) - 1)  # the one that `agree` runs
        self._lent_models = () if inputs.given is None else (_whole_models(inputs.given),)
        if step.loss.replays:
            torch.compiler.cudagraph_mark_step_begin()
        engine, informed = step.engine, step.loss.informed
        self._device = device = engine.layout.mesh.world.device
        facts = None if informed is None else inputs.facts(device, informed)
        self._infos = [None if facts is None else facts.of(part) for part in micro_batches]
        self._rows = [part.valid for part in micro_batches]
        step.agree(micro_batches[-1].data, self._lent_models, self._infos[-1], self._rows)
        up_front = Divisor(engine, step.loss, micro_batches, totals, inputs).up_front
        self._up_front = None if up_front is None else filled(up_front, wide_dtype(engine), device)
        # 0 for a filler or a weight of 0: tensors, since numbers would be compiled in
        self._keeps = [
            filled(part.valid and totals.weight_of(index) > 0, torch.float32, device)
            for index, part in enumerate(micro_batches)
        ]
        self._open = False  # a forward whose backward has not run
        # of the micro-batches so far
        self._sums = torch.zeros(2, dtype=_sum_type(device), device=device)
        self._grads = step.blank() if len(micro_batches) > 1 else []
        self._reached = [False] * len(self._grads)
        self._kinds: set[bool] = set()  # whether losses are an `fa.Mean`
        self._aux = AuxValues(partial_rows=engine.layout.mesh.partial_rows)

    def forward(self, index: int) -> None:
        """Seed the random streams for a micro-batch. Its program runs in `backward`."""
        if self._open:
            raise out_of_turn("a captured step", index)
        self._open = True
        self._inputs.seed(index)

    def backward(self, index: int, _: None) -> None:
        """Run a micro-batch's program, forward and backward."""
        self._open = False
        enter("captured step", index)
        step, part = self._step, self._micro_batches[index]
        data, keep, lent_models, info = part.data, self._keeps[index], self._lent_models, self._infos[index]
        if index < len(self._micro_batches) - 1:
            out: Any = step.call(
                step.add, data, lent_models, info, keep, self._up_front, self._grads, self._sums
            )
            self._sums = out.sums
            self._reached = list(map(operator.or_, self._reached, out.reached))
        else:
            out = step.call(step.finish, data, lent_models, info, keep, self._given())
            if step.loss.replays:  # the next replay of a CUDA graph writes to the same memory
                metrics, aux, answers, skip = tree.map_tensors(
                    torch.clone, (out.metrics, out.aux, out.answers, out.skip)
                )
                out = out._replace(metrics=metrics, aux=aux, answers=answers, skip=skip)
            self._finished: Finished = out
        self._kinds.add(out.weighted)
        self._aux.take(out.aux, valid=part.valid > 0)

    def _given(self) -> FinishInputs:
        """What the last program takes beside its micro-batch."""
        step, device, inputs, sums = self._step, self._device, self._inputs, self._sums
        # filled on the device one by one: a copy from the host would wait for all work before it
        questions = [filled(value, sums.dtype, device) for value in self._totals.numbers]
        carried: list[torch.Tensor | None] | None = None
        if self._grads:
            carried = [grad if was else None for grad, was in zip(self._grads, self._reached, strict=True)]
        return FinishInputs(
            up_front=self._up_front,
            carried=carried,
            sums=torch.cat([sums, torch.stack(questions)]) if questions else sums,
            global_weight=None if step.loss.weight_fn is None else packed([self._totals.weight], device)[0],
            scale=inputs.scale,
            rates=step.updater.as_tensors(inputs.rates),
            number=step.updater.number(inputs.updates),
            step=filled(inputs.step, torch.int64, device) if step.runs_hooks else None,
        )

    def outcome(self) -> Outcome:
        """Metrics, and the gradients if the update is still to be done, else whether it was left out.

        Raises:
            LossError: one micro-batch returned an `fa.Mean`, and another a bare loss.
        """
        step, out, aux, device = self._step, self._finished, self._aux, self._device
        if self._inputs.step == 0 and step.group is None and step.kind(out.weighted) is not False:
            step.loss.check.undecided(step.loss.where)  # no rank has run the loss by itself
        if len(self._kinds) > 1 and step.loss.weight_fn is None:
            raise mixed_kinds("micro-batch")
        # an answer that lets no step go on raises in the next one: the program has done this update already
        self._totals.hear(None if step.group is None else out.answers)
        if step.group is not None:
            step.engine.agreement.check(structure(aux, step.kind(out.weighted)), step.group)
            if aux.values:
                vector = packed(aux.values, device)
                dist.all_reduce(vector, group=step.group)
                aux.put(unpacked(vector, aux.shapes))
        if step.kind(out.weighted) is False:
            step.loss.check.count({*self._rows, *step.engine.agreement.rows}, step.loss.where)
        metrics = {**out.metrics, **aux.finish(step.group, device)}
        if out.grads is None:
            warns, reached = step.engine.layout.mesh.world.rank == 0, [was or None for was in out.reached]
            step.updater.drop_waiting(reached, self._inputs.updates, warns=warns)
            return Outcome(metrics, metrics["weight"], None, out.skip)
        layout = step.engine.layout
        gradients = Gradients(layout.leaves, apart(out.grads), out.multiplier, layout.held_by, device)
        return Outcome(metrics, metrics["weight"], gradients, None)


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
