"""What replicas do after some steps: parameters, buffers and slots become equal again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fnaccel import _torch, tree
from fnaccel.errors import CapabilityError
from fnaccel.extend import Build, Built, Engine, Updated, engine_without, finisher
from fnaccel.models.building import share_first_values
from fnaccel.strategies.replicas.outer import Outer
from fnaccel.strategies.replicas.record import Diloco, LocalSgd, Replicas
from fnaccel.tree import Tree


@finisher(LocalSgd, around=True)
@finisher(Diloco, around=True)
def build_replicas(build: Build, axis: Replicas) -> tuple[Engine, Built]:
    """The engine of one replica, with averages over replicas after some of its updates."""
    mesh = build.spec.mesh
    all_ranks = mesh.group("loss")

    def prepare(built: Built) -> None:
        build.prepare(built)
        if built.prebuilt and all_ranks is not None:
            share_first_values(built, all_ranks, mesh.world.device)

    engine, built = engine_without(axis, attrs.evolve(build, prepare=prepare))
    boundary = Boundary(axis, engine, built)
    hooks = attrs.evolve(engine.hooks, init=boundary.first, after_update=boundary)
    of_replicas = ("opt",) if axis.slots == "local" else ()
    layout = attrs.evolve(
        engine.layout,
        next_whole=axis.next_whole,
        of_replicas=of_replicas,
        read_between=boundary.anchor if isinstance(axis, Diloco) else None,
    )
    return attrs.evolve(engine, name=axis.maker, layout=layout, hooks=hooks), built


class Boundary:
    """Makes replicas equal after the updates that the axis names. The hook `after_update` of an engine.

    Args:
        axis: the options.
        engine: of one replica.
        built: its modules.
    """

    def __init__(self, axis: Replicas, engine: Engine, built: Built) -> None:
        self._axis = axis
        self._params = [leaf.shard for leaf in engine.layout.leaves]
        self._mean = Mean(engine.layout.mesh.group("dp_replicate") if engine.layout.mesh.degrees else None)
        self._leaves = engine.layout.leaves
        self._made_anew = frozenset(_torch.transient_buffers(built.modules))  # their sizes may depend on rows
        self._outer: Outer | None = None

    def first(self) -> Tree:
        """The first state of the axis: the outer optimizer's, or the number of averages."""
        if isinstance(self._axis, Diloco):
            self._outer = Outer(self._axis.outer, self._leaves, on_host=self._axis.anchor == "host")
            return self._outer.state(0)
        return {"averages": 0}

    def anchor(self, own: Any) -> list[torch.Tensor]:
        """This rank's values of the anchor that a state of the axis holds."""
        return [_torch.local_of(own["anchor"][leaf.name]) for leaf in self._leaves]

    def __call__(self, updated: Updated) -> Tree:
        """Average, if replicas do so after this update. Returns the next state of the axis."""
        own: Any = updated.own
        if self._axis.next_whole(updated.step) != updated.step:
            return own
        self._mean.of_buffers([x for path, x in tree.items(updated.buffers) if path not in self._made_anew])
        if updated.ema is not None:
            self._mean.of(_tensors(updated.ema))
        if self._axis.slots == "average":
            self._mean.of(_tensors(updated.opt))
        if self._outer is None:
            self._mean.of(self._params)
            return {"averages": own["averages"] + 1}
        return self._outer_step(self._outer, own, warmed_up=updated.step > self._axis.warmup)

    def _outer_step(self, outer: Outer, own: Any, *, warmed_up: bool) -> Tree:
        """The outer update, or while replicas warm up a mean that becomes the anchor."""
        assert isinstance(self._axis, Diloco)
        outer.take(own)
        updates = own["updates"]
        if warmed_up:
            changes = [a.to(p.device) - p for a, p in zip(outer.anchor, self._params, strict=True)]
            self._mean.of(changes, torch.bfloat16 if self._axis.send == "bfloat16" else None)
            updates += 1
            outer.step(changes, updates)
            _torch.foreach_copy_(self._params, outer.anchor)
        else:
            self._mean.of(self._params)
            _torch.foreach_copy_(outer.anchor, self._params)
        return outer.state(updates)


class Mean:
    """Means over replicas, in place. `group` is None if there is one.

    Tensors are sent as one: its memory is that of the gradients, which are freed by then.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def of(self, tensors: Sequence[torch.Tensor], send: torch.dtype | None = None) -> None:
        """The mean of floating-point or complex tensors, summed in at least float32, or in `send`.

        Raises:
            CapabilityError: one holds whole numbers, such as slots in 8 bits.
        """
        if any(not (x.is_floating_point() or x.is_complex()) for x in tensors):
            raise CapabilityError(
                "a slot of the optimizer holds whole numbers, which have no mean",
                where="a strategy with slots='average'",
                fix="slots='local'; or an optimizer whose slots are floating-point numbers",
            )
        reals = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
        for dtype in dict.fromkeys(x.dtype for x in reals):
            own = [x for x in reals if x.dtype is dtype]
            self._average(own, send or torch.promote_types(dtype, torch.float32))

    def of_buffers(self, tensors: Sequence[torch.Tensor]) -> None:
        """The mean of floating-point buffers. Of others, such as counts, the largest value."""
        # in float64 the mean of equal values is that value, for any number of replicas
        wide = torch.float32 if any(x.device.type == "mps" for x in tensors) else torch.float64
        tensors = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
        self._average([x for x in tensors if x.is_floating_point()], wide)
        for tensor in tensors if self._group is not None else ():
            if not tensor.is_floating_point():
                whole = tensor.to(torch.int64)
                dist.all_reduce(whole, dist.ReduceOp.MAX, group=self._group)
                tensor.copy_(whole)

    def _average(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        if self._group is None or not tensors:
            return
        flat = torch.cat([x.reshape(-1).to(dtype) for x in tensors])
        dist.all_reduce(flat, group=self._group)
        mean = flat.to(torch.promote_types(dtype, torch.float32)) / self._group.size()
        for x, part in zip(tensors, mean.split([x.numel() for x in tensors]), strict=True):
            x.copy_(part.view(x.shape))


def _tensors(values: Tree) -> list[torch.Tensor]:
    """This rank's parts of the tensors of a tree."""
    return [_torch.local_of(x) for x in tree.leaves(values) if isinstance(x, torch.Tensor)]
