"""A whole step as compiled programs: forward, backward, averaging, clip, finite check and update.

Two programs serve any number of micro-batches: one adds the gradients of a micro-batch to those before
it, the other takes the last micro-batch and does all the rest. With one micro-batch only the second runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fnaccel import _torch, tree
from fnaccel.collectives import gather_objects
from fnaccel.engine.capture import Capture
from fnaccel.engine.combine import AuxValues, check_aux, detached, divide, mixed_kinds, packed, structure
from fnaccel.engine.eager import (
    Call,
    Loss,
    Micro,
    attempt,
    generators_of,
    multiplier_of,
    up_front_of,
    wide_dtype,
)
from fnaccel.engine.engine import Engine
from fnaccel.engine.gradients import Gradients, added, apart, laid_out
from fnaccel.engine.step_totals import Report
from fnaccel.errors import CapabilityError
from fnaccel.optim import kernels
from fnaccel.program.tail import Tail
from fnaccel.step.loss import check_attached, check_reached, idle, masked, read_loss
from fnaccel.step.settings import Compiler
from fnaccel.step.step import Info


@attrs.frozen(kw_only=True)
class Found:
    """What a step came to: its metrics; and the gradients, where the update is still to be done."""

    metrics: dict[str, Any]
    grads: Gradients | None
    skip: Any


class WholeStep:
    """The compiled programs of one train step.

    Args:
        engine: the strategy made real.
        capture: how its step can be captured.
        loss: the loss function under its FORWARD transforms.
        settings: how to compile.
        tail: what follows the gradients; None leaves it to the caller.
        update: `update(grads, rates, number)` updates the parameters.
        params: the parameters as hooks see them.
    """

    def __init__(
        self,
        engine: Engine,
        capture: Capture,
        loss: Loss,
        settings: Compiler,
        tail: Tail | None,
        update: Callable[[Gradients, Any, torch.Tensor], None],
        params: Any,
    ) -> None:
        self._engine = engine
        self._capture = capture
        self._loss = loss
        self._tail = tail
        self._update = update
        self._params = params
        self._traced = attrs.evolve(engine, layout=attrs.evolve(engine.layout, leaves=self._capture.leaves))
        self._group = engine.layout.mesh.group("batch")
        self._agreed: tuple[bool, ...] | None = None
        self._replays = settings.mode in ("reduce-overhead", "max-autotune")
        kernels.register()
        self._add = settings.of_step(self._adding(), capture.graph_pass)
        self._finish = settings.of_step(self._finishing(), capture.graph_pass)

    def run(self, micros: Sequence[Micro], call: Call, rates: Any, number: torch.Tensor) -> Found:
        """One step.

        Args:
            micros: this rank's micro-batches.
            call: what changes from call to call.
            rates: 0-d tensors, one for each group of each optimizer.
            number: 0-d tensor, the number of this update.

        Raises:
            CapabilityError: a lent model whose parameters are sharded; in the first call, parameters without
                a gradient under ddp.
        """
        given = () if call.given is None else (_whole_models(call.given),)
        if self._replays:
            torch.compiler.cudagraph_mark_step_begin()
        engine, device = self._engine, self._engine.layout.mesh.world.device
        before, last = micros[:-1], micros[-1]
        hooked = self._tail is not None and (self._tail.gradients or self._tail.updates)
        step = _filled(call.step, torch.int64, device) if hooked else None

        def body(seed: Callable[[int], None]) -> tuple[Any, Report, AuxValues]:
            if self._capture.before is not None:
                self._capture.before()
            self._agree(last.data, given)
            report = Report(self._group, device, engine.agreement, call.notice)
            up_front = up_front_of(self._loss, micros, call, report, engine)
            up_front = None if up_front is None else _filled(up_front, wide_dtype(engine), device)
            known = packed([report.weight], device)[0] if self._loss.weight_fn is not None else None
            keeps = [self._keep(micro, report.weight_of(index)) for index, micro in enumerate(micros)]
            aux = AuxValues()
            sums, carried, weighted = self._accumulate(before, given, up_front, aux, keeps, seed)
            seed(len(before))
            sums = torch.cat([sums, _filled(report.asked, sums.dtype, device).view(1)])
            outs = self._call(
                self._finish, last.data, given, keeps[-1], up_front, carried, sums, known,
                call.scale, rates, number, step,
            )  # fmt: skip
            self._check_kinds({*weighted, outs[0][4]})
            return outs, report, aux

        outs, report, aux = attempt(engine, call, body)
        # the next replay of a CUDA graph writes to the same memory
        metrics, found, asked, skip, weighted = (
            tree.map_tensors(torch.clone, outs[0]) if self._replays else outs[0]
        )
        grads, multiplier = outs[1]
        report.hear(asked)
        aux.take(found, valid=last.valid > 0)
        metrics.update(self._shared(aux, weighted))
        pending = None
        if self._tail is None:
            pending = Gradients(
                engine.layout.leaves, apart(grads), multiplier, engine.layout.norm_axes, device
            )
        return Found(metrics=metrics, grads=pending, skip=skip)

    def _check_kinds(self, weighted: set[bool]) -> None:
        if len(weighted) > 1 and self._loss.weight_fn is None:
            raise mixed_kinds("micro-batch")

    def _accumulate(
        self,
        micros: Sequence[Micro],
        given: Any,
        up_front: Any,
        aux: AuxValues,
        keeps: Sequence[torch.Tensor],
        seed: Callable[[int], None],
    ) -> tuple[torch.Tensor, list[torch.Tensor | None] | None, set[bool]]:
        """Total and weight, the gradients, and the kinds of loss, of all micro-batches but the last."""
        device = self._engine.layout.mesh.world.device
        sums = torch.zeros(2, dtype=_sum_type(device), device=device)
        if not micros:
            return sums, None, set()
        whole = self._capture.average is None or not self._loss.sync_each
        shards = self._capture.leaves
        grads = self._capture.blank() if whole else [torch.zeros_like(leaf.shard) for leaf in shards]
        used = (False,) * len(grads)
        kinds: set[bool] = set()
        for index, micro in enumerate(micros):
            seed(index)
            sums, now, found, weighted = self._call(
                self._add, micro.data, given, keeps[index], up_front, grads, sums
            )
            kinds.add(weighted)
            used = tuple(a or b for a, b in zip(used, now, strict=True))
            aux.take(found, valid=micro.valid > 0)
        return sums, [grad if was else None for grad, was in zip(grads, used, strict=True)], kinds

    def _call(self, program: Callable[..., Any], data: Any, given: Any, *args: Any) -> Any:
        """Run a compiled program; where it can't be compiled, first see whether the loss itself fails."""
        try:
            return program(data, given, *args)
        except _torch.compile_errors():
            # shards are gathered by all ranks, and others may not have failed
            if not any(leaf.sharded for leaf in self._capture.leaves):
                self._try_eagerly(data, given)
            raise

    def _agree(self, data: Any, given: Any) -> None:
        """See, before the first step, that ranks report alike, and which parameters any of them uses.

        Raises:
            LossError: ranks return losses of different kinds, or different aux.
            CapabilityError: no rank has a gradient for some parameter, and the strategy needs one.
        """
        if self._group is None or self._agreed is not None:
            return
        aux, weighted, own = self._eagerly(data, given)
        values = AuxValues()
        values.take(detached(aux), valid=False)
        self._engine.agreement.check(structure(values, self._kind(weighted)), self._group)
        used = tuple(map(any, zip(*gather_objects(own, over=self._group), strict=True)))
        if self._capture.complete and not all(used):
            names = [leaf.name for leaf, was in zip(self._capture.leaves, used, strict=True) if not was]
            raise CapabilityError(
                f"{', '.join(names)} got no gradient on any rank",
                where="fa.ddp()",
                fix="freeze them, fa.train_step(frozen=...); or fa.ddp(unused_parameters=True), for which "
                "fa.compile takes the loss only",
            )
        self._agreed = used

    def _try_eagerly(self, data: Any, given: Any) -> None:
        """Raise what the loss function raises without compilation."""
        try:
            self._eagerly(data, given)
        except Exception as error:
            raise error from None  # torch's own account of it is longer, and says less

    def _kind(self, weighted: bool) -> bool | None:
        return weighted if self._loss.weight_fn is None else None

    def _eagerly(self, data: Any, given: Any) -> tuple[Any, bool, list[bool]]:
        """Aux, whether the loss is weighted, and which parameters get a gradient, without compilation.

        Leaves nothing behind.
        """
        engine = self._engine
        slots = [_torch.buffers_of(module) for root in engine.layout.modules for module in root.modules()]
        kept = [(own, name, x, x.clone()) for own in slots for name, x in own.items() if x is not None]
        states = [(one, one.get_state()) for one in generators_of(engine.layout.mesh.world.device)]
        try:
            params, run = self._capture.open()
            parts = read_loss(run(self._loss.fn, data, *given), self._loss.where)
            check_attached(parts.total, self._loss.where)
            check_aux(parts.aux)
            grads: Any = torch.autograd.grad(parts.total, params, allow_unused=True)
            self._check_reached(grads)
            return parts.aux, parts.weighted, [grad is not None for grad in grads]
        finally:
            for generator, state in states:
                generator.set_state(state)
            with torch.no_grad():
                for own, name, buffer, before in kept:
                    own[name] = buffer.copy_(before)

    def _check_reached(self, grads: Sequence[Any]) -> None:
        if self._group is None and not self._engine.layout.norm_axes:  # another rank may have gradients
            check_reached(grads, self._loss.where)

    def _keep(self, micro: Micro, weight: Any) -> torch.Tensor:
        """1, or 0 for a filler or a weight of 0: a tensor, since a number would be compiled in."""
        return _filled(weight > 0 if micro.valid else 0, torch.float32, self._engine.layout.mesh.world.device)

    def _shared(self, aux: AuxValues, weighted: bool) -> dict[str, Any]:
        """The aux of all ranks, in an all-reduce of its own where there is any."""
        device = self._engine.layout.mesh.world.device
        if self._group is not None:
            self._engine.agreement.check(structure(aux, self._kind(weighted)), self._group)
            if aux.values:
                vector = packed(aux.values, device)
                dist.all_reduce(vector, group=self._group)
                aux.put(vector.unbind())
        return aux.finish(self._group, device)

    # what follows runs inside of the graphs

    def _adding(self) -> Callable[..., Any]:
        def add(
            data: Any, given: Any, keep: Any, up_front: Any, carried: list[torch.Tensor], sums: torch.Tensor
        ) -> Any:
            total, sums, aux, weighted, params = self._forward(data, given, keep, sums)
            grads = self._backward(total, params, keep, up_front, average=self._loss.sync_each)
            for held, grad in zip(carried, grads, strict=True):
                if grad is not None:
                    held.add_(grad)
            return sums, tuple(grad is not None for grad in grads), aux, weighted

        return add

    def _finishing(self) -> Callable[..., Any]:
        def finish(
            data: Any, given: Any, keep: Any, up_front: Any, carried: Any, sums: torch.Tensor, known: Any,
            scale: Any, rates: Any, number: torch.Tensor, step: Any,
        ) -> Any:  # fmt: skip
            total, sums, aux, weighted, params = self._forward(data, given, keep, sums)
            if self._group is not None:
                sums = _torch.begin_all_reduce(sums, self._group)  # beside the backward pass
            grads = self._backward(total, params, keep, up_front, average=self._loss.sync_each)
            if carried is not None:
                grads = [added(held, grad) for held, grad in zip(carried, grads, strict=True)]
            self._check_reached(grads)
            if not self._loss.sync_each:
                grads = self._average(grads, params)
            pairs = zip(grads, self._capture.leaves, strict=True)
            grads = [None if grad is None else laid_out(grad, leaf.shard) for grad, leaf in pairs]
            if self._group is not None:
                sums = _torch.end_collective(sums)
            weight = sums[1] if known is None else known
            multiplier = multiplier_of(self._loss, self._engine, weight, scale, up_front)
            dtype = torch.promote_types(total.dtype, torch.float32)
            loss = divide(sums[0], weight, sums.device).to(dtype)
            metrics: dict[str, Any] = {"loss": loss, "weight": weight.clone()}
            if self._tail is None:
                return (metrics, aux, sums[2], None, weighted), (grads, multiplier)
            skip = self._end(self._tail, grads, multiplier, metrics, rates, number, step)
            return (metrics, aux, sums[2], skip, weighted), (None, None)

        return finish

    def _forward(self, data: Any, given: Any, keep: Any, sums: torch.Tensor) -> Any:
        params, run = self._capture.open()
        total, weight, aux, weighted = read_loss(run(self._loss.fn, data, *given), self._loss.where)
        check_attached(total, self._loss.where)
        check_aux(aux)
        if self._loss.weight_fn is None:
            total, weight = masked(total, weight)
        counted = torch.stack([_number(total, sums), _number(weight, sums)])
        counted = torch.where(keep > 0, counted, torch.zeros_like(counted))
        if sums.numel() > 2:  # the last is whether this rank was asked to stop
            counted = torch.cat([counted, torch.zeros_like(counted[:1])])
        return total, sums + counted, detached(aux), weighted, params

    def _backward(
        self, total: torch.Tensor, params: list[torch.Tensor], keep: Any, up_front: Any, *, average: bool
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
        # every rank sends every gradient, also one that it has not: others may have it
        pairs = zip(grads, params, strict=True)
        averaged = average([torch.zeros_like(param) if grad is None else grad for grad, param in pairs])
        own = tuple(grad is not None for grad in grads)
        used = own if self._agreed is None else self._agreed
        return [found if was else None for found, was in zip(averaged, used, strict=True)]

    def _end(
        self,
        tail: Tail,
        grads: Any,
        multiplier: Any,
        metrics: dict[str, Any],
        rates: Any,
        number: torch.Tensor,
        step: torch.Tensor,
    ) -> Any:
        """Clip, finite check, update, averages; whether the update was skipped."""
        engine = self._traced

        def record(name: str, value: Any) -> None:
            metrics[name] = value

        with torch.no_grad():
            layout = engine.layout
            device = layout.mesh.world.device
            held = Gradients(layout.leaves, list(grads), multiplier, layout.norm_axes, device)
            held.idle = idle(metrics["weight"])
            info = Info(step=step, updates=number - 1, params=self._params, record=record)
            tail.change(held, {}, info)
            self._update(held, rates, number)
            return tail.finish(engine, held, {}, info)


def _whole_models(given: Any) -> Any:
    if any(hasattr(p, "placements") for engine in given.engines for p in engine.layout.parameters.values()):
        raise CapabilityError(
            "a model that lies in shards is lent to a step that is captured as one graph",
            where="train_step(state, batch, given=...)",
            fix="lend a model under local() or ddp(); or fa.compile(step, scope='block') (scope 'loss' where "
            "the borrower is not sharded)",
        )
    return given.models


def _sum_type(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _filled(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A 0-d tensor, filled on the device: a copy of a host value would wait for all work before it."""
    return (
        value.to(dtype)
        if isinstance(value, torch.Tensor)
        else torch.full((), value, dtype=dtype, device=device)
    )


def _number(value: Any, like: torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().to(like.dtype)
    return torch.full((), value, dtype=like.dtype, device=like.device)
