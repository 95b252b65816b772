"""The forward and backward passes of one update, on any strategy, and the gradients that they leave.

An engine's `drive` runs the passes of all micro-batches in an order of its own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs
import torch

from fnaccel import _torch
from fnaccel.data.micro_batches import MicroBatches
from fnaccel.engine.engine import Engine
from fnaccel.engine.gradients import Gradients, zeroed
from fnaccel.engine.lacking import lacking
from fnaccel.engine.totals import Totals
from fnaccel.engine.update_facts import UpdateFacts
from fnaccel.errors import CapabilityError, FnaccelError, LossError
from fnaccel.step.loss import (
    Scalar,
    check_attached,
    check_reached,
    check_weight,
    gradients_changed,
    read_loss,
)
from fnaccel.step.loss_info import Informed
from fnaccel.step.total_graph import TotalCheck
from fnaccel.tree import Tree
from fnaccel.world.progress_marks import enter
from fnaccel.world.random_streams import fold


@attrs.frozen(kw_only=True)
class Loss:
    """The loss, as an engine sees it.

    Attributes:
        fn: the loss function under its FORWARD transforms.
        where: its name, for messages.
        weight_fn: weight from the batch alone, or None.
        sync_each: average over ranks after each micro-batch, not once.
        informed: the loss function inside of `fn`, if it takes `info`.
        replays: whether it runs as CUDA graphs, which have to know where a micro-batch begins.
        check: what the first update shows of its total.
    """

    fn: Callable[..., Any]
    where: str
    weight_fn: Callable[[Any], Any] | None = None
    sync_each: bool = False
    informed: Informed | None = None
    replays: bool = False
    check: TotalCheck = attrs.field(factory=TotalCheck, eq=False)


@attrs.frozen
class Inputs:
    """What an update takes from a state, and what was lent for it.

    Attributes:
        step: calls of the train step before this one.
        updates: updates before this one. A captured step takes them, and the rates.
        rates: the learning rates of each group of each optimizer.
        root: the root seed.
        rank: which part of the loss this rank computes. Ranks with other parts draw other random numbers.
        streams: the random streams that are seeded for each micro-batch. None of them under `rng="stream"`.
        scale: the loss scale of fp16, a 0-d tensor, or None.
        last_weight: the global weight of the step before, with a loss scale.
        given: the models of other train steps, or None.
        backward_hooks: whether there are some, which are to see gradients of a mean.
        extras: those of the state.
    """

    step: int
    updates: Scalar
    rates: list[list[Any]]
    root: int
    rank: int
    streams: Sequence[torch.Generator]
    scale: torch.Tensor | None = None
    last_weight: torch.Tensor | None = None
    given: Any = None
    backward_hooks: bool = False
    extras: Tree = None

    def seed(self, micro_batch: int) -> None:
        """Seed the random streams for one micro-batch."""
        for stream in self.streams:
            stream.manual_seed(fold(self.root, self.step, micro_batch, self.rank))

    def facts(self, device: torch.device, informed: Informed) -> UpdateFacts:
        """The facts that a loss function with `info` may know."""
        return UpdateFacts(
            self.root,
            self.step,
            self.updates,
            self.extras,
            device,
            traced=informed.traced,
            dynamic=informed.dynamic,
        )


class Outcome(NamedTuple):
    """What the passes of an update leave.

    Attributes:
        metrics: `loss`, `weight`, and aux.
        weight: of the rows whose gradients were averaged. If it is 0, the update is left out.
        gradients: averages over ranks, and the factor that they lack. None if a captured step did the update.
        skip: if it did, 1 if it left the update out, 0 if not, None if it never does.
    """

    metrics: dict[str, Any]
    weight: Scalar
    gradients: Gradients | None
    skip: Any


class Passes:
    """The passes of one update's micro-batches, by index, for an engine's `drive`.

    Changes no parameter. See `Divisor` for what the gradients are divided by, and where.

    Args:
        engine: the strategy made real.
        loss: the loss.
        micro_batches: those of this rank.
        totals: what ranks sum.
        inputs: the rest.

    Attributes:
        sync: the context of a micro-batch, as `drive` takes it.
    """

    def __init__(
        self, engine: Engine, loss: Loss, micro_batches: MicroBatches, totals: Totals, inputs: Inputs
    ) -> None:
        self._engine = engine
        self._loss = loss
        self._micro_batches = micro_batches
        self._totals = totals
        self._inputs = inputs
        self.sync = (lambda _: engine.forward.sync(True)) if loss.sync_each else engine.forward.sync
        self._open = 0  # forwards whose backward has not run
        informed = loss.informed
        self._facts = None if informed is None else inputs.facts(engine.layout.mesh.world.device, informed)
        self._divisor = Divisor(engine, loss, micro_batches, totals, inputs)

    def forward(self, index: int, stage: int = -1) -> tuple[torch.Tensor | None, bool]:
        """Run a micro-batch's forward, with the seed of its index. On one stage, if the model has some.

        Returns:
            The total as it is differentiated, and whether the micro-batch counts: what `backward` takes. The
            total is None if another rank computes the loss.
        """
        engine, micro_batch, given = self._engine, self._micro_batches[index], self._inputs.given
        if self._open and not engine.forward.nests:
            raise out_of_turn(engine.name, index)
        if self._loss.replays and not self._open:
            torch.compiler.cudagraph_mark_step_begin()
        self._open += 1
        self._inputs.seed(index)
        if self._facts is not None and self._loss.informed is not None:
            self._loss.informed.info = self._facts.of(micro_batch)
        enter("forward", index, stage)
        counts = micro_batch.valid > 0
        if engine.hooks.micro_batch is not None:
            engine.hooks.micro_batch(counts)
        first = engine.layout.leaves[0].param if engine.layout.leaves else None
        before = None if first is None else first.grad
        read = functools.partial(self._read, index)
        if given is None:
            total = engine.forward.run(read, micro_batch.data)
        else:
            total = given.within(lambda: engine.forward.run(read, micro_batch.data, given.models))
        if total is None:
            return None, counts
        check_attached(total, self._loss.where)
        if first is not None and first.grad is not before:
            raise gradients_changed(self._loss.where)
        return total, self._totals.counts

    def _read(self, index: int, model: object, *args: Any) -> torch.Tensor:
        """The total of the loss. Its other parts go to the totals, since hooks of modules see all outputs."""
        loss, totals = self._loss, self._totals
        parts = read_loss(loss.fn(model, *args), loss.where)
        if self._inputs.step == 0:
            loss.check.take(parts, loss.where, None if loss.weight_fn is None else totals.weight_of(index))
        return totals.take(parts, self._micro_batches[index].valid)

    def backward(self, index: int, after_forward: tuple[torch.Tensor | None, bool], stage: int = -1) -> None:
        """Differentiate a micro-batch's total. `after_forward` is what its `forward` returned."""
        engine, totals = self._engine, self._totals
        total, counts = after_forward
        enter("backward", index, stage)
        self._open -= 1
        if total is None:
            engine.forward.backward(total)
            return
        if len(totals.rows) == len(self._micro_batches) and engine.forward.stages == 1:
            totals.send()  # overlaps with the backward pass
        total = self._divisor.before_backward(total)
        if counts:
            engine.forward.backward(total)
            return
        if engine.hooks.micro_batch is not None:
            engine.hooks.micro_batch(False)
        # 0 times an infinity in the loss, such as a mean over nothing, would make every gradient NaN
        with zeroed(total):
            engine.forward.backward(total)

    def outcome(self) -> Outcome:
        """Metrics, and the gradients after the last backward, averaged over ranks.

        Raises:
            LossError: no parameter got one.
            MicroBatchError, RankMismatchError: what ranks told each other beside the totals does not fit.
        """
        engine, loss, totals = self._engine, self._loss, self._totals
        enter("gradients")
        if engine.hooks.micro_batch is not None:
            engine.hooks.micro_batch(True)
        whole = engine.forward.whole
        if whole is not None:
            whole.check_kept()
            if whole.held:
                whole.reduce()
        if engine.hooks.finish is not None:
            engine.hooks.finish()
        layout, plain = engine.layout, torch.Tensor
        grads = [
            g if (g := leaf.param.grad) is None or type(g) is plain else _torch.local_of(g)
            for leaf in layout.leaves
        ]
        # a runtime may keep gradients to itself
        if engine.runtime.bound is None and (not grads or grads[0] is None):
            check_reached(grads, loss.where)
        divisor = self._divisor
        if engine.forward.stages > 1:
            totals.send()
        if not divisor.waits_for_weight:
            totals.wait()
        if totals.weighted is False:
            loss.check.count({*totals.rows, *engine.agreement.rows}, loss.where)
        weight = totals.averaged_weight
        multiplier = multiplier_of(engine, weight, self._inputs.scale, divisor.up_front, divisor.after)
        gradients = Gradients(layout.leaves, grads, multiplier, layout.held_by, layout.mesh.world.device)
        return Outcome(totals.finish(), weight, gradients, None)


def out_of_turn(name: str, index: int) -> CapabilityError:
    """The error for a forward before the backward of the micro-batch before it."""
    return CapabilityError(
        f"{name} runs each backward right after its forward, and micro-batch {index} began before that",
        where="Forward(drive=...)",
        fix="drive=in_turn for this engine; or another strategy",
    )


class Divisor:
    """Where the totals of an update are divided by their global weight: as early as that is known.

    A backward pass of an engine averages over the N ranks of `mesh["gradient"]`, and the weight is theirs, so
    `up_front / N * multiplier` is 1 / weight: the factor of totals before it, and that of gradients after it
    (`multiplier_of`).

        where the weight is known                 where totals are divided by it
        from the batch (`weight_fn`)              before each backward
        from one forward, hooks want a mean       before its backward, at the cost of a wait for other ranks
        from the last forward                     after the last backward
        the same, under fp16                      there. Totals are divided by the last step's weight before

    Args:
        engine, loss, micro_batches, totals, inputs: of the update, as for `Passes`.

    Attributes:
        waits_for_weight: whether ranks wait for it before the backward pass.
        up_front: the factor of totals before backward: the loss scale, over a weight that is known by then.
        after: the factor of gradients but for the loss scale, if totals were divided before: N, or 1 if
            `up_front` has it. None if it follows from the weight that is known then.
    """

    def __init__(
        self, engine: Engine, loss: Loss, micro_batches: MicroBatches, totals: Totals, inputs: Inputs
    ) -> None:
        self._engine, self._totals = engine, totals
        weight_fn, scale, mesh = loss.weight_fn, inputs.scale, engine.layout.mesh
        alone = len(micro_batches) == 1 and engine.forward.stages == 1
        self.waits_for_weight = inputs.backward_hooks and weight_fn is None and alone
        # N comes after it if hooks look on: they are to see the gradients that they would see on one rank
        self._unseen = mesh.gradient_size if inputs.backward_hooks else 1
        self.after = None if weight_fn is None and not self.waits_for_weight else float(self._unseen)
        self.up_front: Any = None
        if weight_fn is not None:
            totals.know_weights(
                [check_weight(weight_fn(m.data), loss.where) if m.valid else 0 for m in micro_batches]
            )
            ratio = _ranks_over_weight(self._engine, self._totals.averaged_weight, self._unseen)
            self.up_front = ratio if scale is None else scale * ratio
        elif self.waits_for_weight:
            self.up_front = scale
        elif scale is not None and inputs.last_weight is not None:
            # the last global weight stands in for this one, so that a raw sum does not overflow fp16
            self.up_front = scale / inputs.last_weight.to(mesh.world.device)

    def before_backward(self, total: torch.Tensor) -> torch.Tensor:
        """The total of a micro-batch as it is differentiated."""
        if self.waits_for_weight:
            self._totals.wait()
            total = total * _ranks_over_weight(self._engine, self._totals.averaged_weight, self._unseen)
        return total if self.up_front is None else total * self.up_front


def multiplier_of(
    engine: Engine, weight: Scalar, scale: Scalar | None, up_front: Scalar | None, after: float | None
) -> Any:
    """The factor that gradients still lack after the backward passes, which average over ranks. None for 1.

    Args:
        engine, weight, scale: of the step.
        up_front, after: as `Divisor` has them.
    """
    if after is not None:
        multiplier = after if scale is None else after / scale
    else:
        multiplier = _ranks_over_weight(engine, weight)
        if up_front is not None:
            multiplier = multiplier / up_front
    return None if isinstance(multiplier, float) and multiplier == 1.0 else multiplier


def _ranks_over_weight(engine: Engine, weight: Scalar, unseen: int = 1) -> Any:
    """N / weight: it undoes the engine's average, and divides. `unseen` is the part of N that comes later."""
    ranks = engine.layout.mesh.gradient_size / unseen
    if isinstance(weight, torch.Tensor):
        dtype = wide_dtype(engine)
        # a count divides to torch's default dtype
        weight = weight.to(dtype) if dtype is torch.float64 else weight
        return torch.where(weight > 0, ranks / weight, torch.zeros_like(weight)).to(dtype)
    return ranks / weight if weight else 0.0


def wide_dtype(engine: Engine) -> torch.dtype:
    """The dtype of scalars that gradients are multiplied by: fp32, or fp64 if the parameters are."""
    leaves = engine.layout.leaves
    return torch.float64 if leaves and leaves[0].shard.dtype is torch.float64 else torch.float32


# torch's errors for a matrix product of two dtypes
_MIXED = re.compile(r"same dtype|expected scalar type|mixed dtype", re.IGNORECASE)


def explained(error: BaseException, engine: Engine) -> FnaccelError | None:
    """The error for a user in the place of one that torch raised in a pass, or None."""
    dtypes = {str(leaf.shard.dtype).removeprefix("torch.") for leaf in engine.layout.leaves}
    if isinstance(error, RuntimeError) and _MIXED.search(str(error)) and not dtypes <= {"float32"}:
        names = " and ".join(sorted(dtypes))
        return LossError(
            f"the model's parameters are {names}, and something in the loss is not: "
            f"{str(error).splitlines()[0]}",
            where="the loss function",
            fix="cast the batch to the parameters' dtype, or let fa.with_precision(step, "
            'fa.transforms.Precision(param="bf16", compute="bf16")) do so',
        )
    own = None if engine.hooks.explain is None else engine.hooks.explain(error)
    return own or lacking(error)
