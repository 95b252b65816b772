"""Gradients of a loss over micro-batches, eagerly: the loop that all strategies share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import torch

from fnaccel import _torch
from fnaccel.collectives.objects import gather_objects
from fnaccel.data.cut import rows_of
from fnaccel.engine.engine import Engine
from fnaccel.engine.gradients import Gradients, zeroed
from fnaccel.engine.same_position import SamePosition
from fnaccel.engine.step_totals import Report
from fnaccel.engine.stop_request import Notice
from fnaccel.errors import LossError, MicroBatchError
from fnaccel.step.loss import (
    Scalar,
    check_attached,
    check_divided,
    check_reached,
    check_weight,
    gradients_changed,
    read_loss,
)
from fnaccel.world.progress_marks import enter
from fnaccel.world.random_streams import fold, generators_of

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Micro:
    """One micro-batch of this rank. `valid` 0 marks a filler."""

    data: Any
    valid: int


@attrs.frozen(kw_only=True)
class Loss:
    """The loss, as an engine sees it.

    Attributes:
        fn: the loss function under its FORWARD transforms.
        where: its name, for messages.
        weight_fn: weight from the batch alone, or None.
        sync_each: average over ranks after each micro-batch, not once.
    """

    fn: Callable[..., Any]
    where: str
    weight_fn: Callable[[Any], Any] | None = None
    sync_each: bool = False


@attrs.frozen(kw_only=True)
class Call:
    """The values that change from call to call: the root seed (None: PyTorch's own stream), the loss
    scale, lent models, the notice of stop requests, the comparison of positions, a function told of an error
    before it is undone, and whether hooks in the backward pass are to see gradients of a mean."""

    root: int | None
    step: int
    scale: Any = None
    last_weight: Any = None
    given: Any = None
    notice: Notice | None = None
    place: SamePosition | None = None
    explain: Callable[[BaseException], None] | None = None
    hooked: bool = False


def gradients(engine: Engine, loss: Loss, micros: Sequence[Micro], call: Call) -> tuple[Gradients, Report]:
    """Gradients of the sum of totals over all micro-batches and ranks, not yet divided.

    Changes no parameter. An exception leaves no gradient behind.
    """
    return attempt(engine, call, lambda seed: _run_micro_batches(engine, loss, micros, call, seed))


def undo(engine: Engine) -> None:
    """Clear the gradients and gathered parameters of a step that did not reach its end."""
    engine.clear()
    for restore in (engine.hooks.settle, engine.hooks.recover):
        if restore is not None:
            restore()


def attempt(engine: Engine, call: Call, body: Callable[[Callable[[int], None]], T]) -> T:
    """Return `body(seed)`, which runs the micro-batches of a step. `seed(i)` seeds the generators for one.

    The generators end as they were. An exception leaves no gradient behind.
    """
    mesh = engine.layout.mesh
    generators = [] if call.root is None else generators_of(mesh.world.device)
    # a data set may draw from the same generators, and has to find them as it left them (1 us)
    states = [generator.get_state() for generator in generators]
    rank = mesh.loss_rank if generators else 0

    def seed(micro_batch: int) -> None:
        for generator in generators:
            generator.manual_seed(fold(call.root or 0, call.step, micro_batch, rank))

    def put_back() -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    complete = False
    try:
        try:
            return body(seed)
        except BaseException as error:
            if call.explain is not None:
                call.explain(error)
            undo(engine)
            explained = _mixed_dtypes(error, engine)
            if explained is None and engine.hooks.explain is not None:
                explained = engine.hooks.explain(error)
            if explained is not None:
                raise explained from error
            raise
        finally:
            put_back()
            complete = True
    finally:
        if not complete:  # an interrupt came in the middle
            put_back()


# torch's errors for a matrix product of two dtypes
_MIXED = re.compile(r"same dtype|expected scalar type|mixed dtype", re.IGNORECASE)


def _mixed_dtypes(error: BaseException, engine: Engine) -> LossError | None:
    dtypes = {str(leaf.shard.dtype).removeprefix("torch.") for leaf in engine.layout.leaves}
    if not isinstance(error, RuntimeError) or not _MIXED.search(str(error)) or dtypes <= {"float32"}:
        return None
    names = " and ".join(sorted(dtypes))
    return LossError(
        f"the model's parameters are {names}, and something in the loss is not: {str(error).splitlines()[0]}",
        where="the loss function",
        fix="cast the batch to the parameters' dtype, or let fa.with_precision(step, "
        'fa.transforms.Precision(param="bf16", compute="bf16")) do so',
    )


def _run_micro_batches(
    engine: Engine, loss: Loss, micros: Sequence[Micro], call: Call, seed: Callable[[int], None]
) -> tuple[Gradients, Report]:
    mesh = engine.layout.mesh
    group = mesh.group("loss")
    device = mesh.world.device
    odd = _odd_rows(engine, micros)
    report = Report(
        group,
        device,
        engine.agreement,
        call.notice,
        call.place,
        odd=None if odd is None else bool(odd),
        partial_rows=mesh.partial_rows,
    )
    up_front = up_front_of(loss, micros, call, report, engine)
    # of one micro-batch the weight is known after its forward, at the cost of a wait for the other ranks
    late = call.hooked and len(micros) == 1 and loss.weight_fn is None
    last, sync = len(micros) - 1, engine.forward.sync
    for index, micro in enumerate(micros):
        seed(index)
        if sync is None:
            enter("forward", index)
            total = _forward(engine, loss, micro, call, report)
            enter("backward", index)
            _backward(engine, total, up_front, report, index == last, late=late)
        else:
            with sync(index == last or loss.sync_each):
                enter("forward", index)
                total = _forward(engine, loss, micro, call, report)
                enter("backward", index)
                _backward(engine, total, up_front, report, index == last, late=late)
    enter("gradients")
    if engine.hooks.micro_batch is not None:
        engine.hooks.micro_batch(True)
    if engine.hooks.finish is not None:
        engine.hooks.finish()
    plain = torch.Tensor
    grads = [
        g if (g := leaf.param.grad) is None or type(g) is plain else _torch.local_of(g)
        for leaf in engine.layout.leaves
    ]
    # a runtime may keep gradients to itself
    if engine.runtime.bound is None and engine.layout.held_by is None and (not grads or grads[0] is None):
        check_reached(grads, loss.where)
    if not late:
        report.wait()
    if call.place is not None:
        call.place.check()
    if odd is not None and report.any_odd():
        raise _wrong_rows(engine, odd)
    left = float(mesh.loss_size) if late or (call.hooked and loss.weight_fn is not None) else None
    multiplier = multiplier_of(loss, engine, report.weight, call.scale, up_front, left)
    return Gradients(engine.layout.leaves, grads, multiplier, engine.layout.held_by, device), report


def _odd_rows(engine: Engine, micros: Sequence[Micro]) -> list[int] | None:
    """Row counts of micro-batches that a runtime's configuration rules out. None if it declares none."""
    declared = engine.runtime.rows
    if declared is None:
        return None
    return sorted({rows_of(micro.data) for micro in micros if micro.valid} - {declared})


def _wrong_rows(engine: Engine, odd: list[int]) -> MicroBatchError:
    each = gather_objects(odd, world=engine.layout.mesh.world)
    listed = ", ".join(f"{rows} on rank {rank}" for rank, rows in enumerate(each) if rows)
    return MicroBatchError(
        f"the configuration of {engine.name} says {engine.runtime.rows} rows in a rank's micro-batch, and it "
        f"has {listed}",
        where="train_step(state, batch)",
        fix='write "auto" for train_batch_size and train_micro_batch_size_per_gpu, or correct the loader',
    )


def multiplier_of(
    loss: Loss,
    engine: Engine,
    weight: Scalar,
    scale: Scalar | None,
    up_front: Scalar | None,
    left: float | None = None,
) -> Any:
    """The factor that the gradients still lack. None for 1.

    Args:
        loss, engine, weight, scale: of the step.
        up_front: the factor of totals before backward.
        left: the factor if totals were divided by the weight before backward, but for the loss scale.
    """
    if left is None and loss.weight_fn is not None:
        left = 1.0
    if left is not None:
        multiplier = left if scale is None else left / scale
    else:
        multiplier = _ratio(engine, weight)
        if up_front is not None:
            multiplier = multiplier / up_front
    return None if isinstance(multiplier, float) and multiplier == 1.0 else multiplier


def up_front_of(loss: Loss, micros: Sequence[Micro], call: Call, report: Report, engine: Engine) -> Any:
    """The factor of totals before backward: the loss scale, over the weight if it is known by now."""
    if loss.weight_fn is not None:
        weights = [check_weight(loss.weight_fn(m.data), loss.where) if m.valid else 0 for m in micros]
        report.know_weights(weights)
        factor = _ratio(engine, report.weight)
        if call.hooked:  # hooks of modules see the gradients that they would see on one rank
            factor = factor / engine.layout.mesh.loss_size
        return factor if call.scale is None else call.scale * factor
    if call.scale is None:
        return None
    if call.hooked and len(micros) == 1:
        return call.scale
    # the last global weight stands in for this one, so that a raw sum does not overflow fp16
    return call.scale / call.last_weight.to(engine.layout.mesh.world.device)


def _ratio(engine: Engine, weight: Scalar) -> Any:
    """The factor that undoes the engine's own average, over the global weight."""
    ranks = engine.layout.mesh.loss_size
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


def _forward(engine: Engine, loss: Loss, micro: Micro, call: Call, report: Report) -> torch.Tensor:
    def entry(model: object, *args: Any) -> torch.Tensor:
        # only the total is an output that hooks see: the report takes the other parts
        parts = read_loss(loss.fn(model, *args), loss.where)
        if call.step == 0 and loss.weight_fn is None:
            check_divided(parts, loss.where)
        return report.take(parts, valid=micro.valid > 0)

    if engine.hooks.micro_batch is not None:
        engine.hooks.micro_batch(micro.valid > 0)
    first = engine.layout.leaves[0].param if engine.layout.leaves else None
    before = None if first is None else first.grad
    args = (micro.data,) if call.given is None else (micro.data, call.given.models)
    if call.given is None:
        total = engine.forward.run(entry, *args)
    else:
        total = call.given.within(lambda: engine.forward.run(entry, *args))
    check_attached(total, loss.where)
    if first is not None and first.grad is not before:
        raise gradients_changed(loss.where)
    return total


def _backward(
    engine: Engine, total: torch.Tensor, up_front: Scalar | None, report: Report, last: bool, *, late: bool
) -> None:
    if last:
        report.send()  # overlaps with the backward pass
    if late:
        report.wait()
        total = total * (_ratio(engine, report.weight) / engine.layout.mesh.loss_size)
    if up_front is not None:
        total = total * up_front
    if report.counts:
        _differentiate(engine, total)
    else:
        if engine.hooks.micro_batch is not None:
            engine.hooks.micro_batch(False)
        # 0 times an infinity in the loss, such as a mean over nothing, would make every gradient NaN
        with zeroed(total):
            _differentiate(engine, total)


def _differentiate(engine: Engine, total: torch.Tensor) -> None:
    if engine.forward.backward is None:
        total.backward()
    else:
        engine.forward.backward(total)
